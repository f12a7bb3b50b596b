"""Engines that die, requests that kill them, steps that fail or stall, clients that leave, signals."""

import asyncio
import json
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace import LLM, SamplingParams
from live_server import LiveServer
from moody_platform import DEADLY, FAILING, SLOW, install

PROMPTS = [[20 + i, 30, 40 + i, 50] for i in range(50)]


@pytest.fixture(scope="module")
def moody(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment with the platform `moody`, whose steps take 5 ms."""
    return install(tmp_path_factory.mktemp("plugins") / "site", step_s=0.005)


@pytest.fixture
def moody_server(model_folder: Path, moody: dict[str, str]) -> Iterator[LiveServer]:
    """A server on it."""
    env = {**moody, "HEADRACE_LOAD_FORMAT": "dummy", "HEADRACE_KV_MEMORY": "32MiB"}
    with LiveServer(model_folder, env=env, device="moody") as running:
        yield running


def expected(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[str]:
    """What the prompts give without any fault."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [output.outputs[0].text for output in outputs]


async def stream(client: httpx.AsyncClient, body: dict[str, Any], started: asyncio.Event | None = None) -> str:
    """The text of a streamed completion. Raises AssertionError for an error in its midst."""
    text = line = ""
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += event["choices"][0]["text"]
                if started is not None:
                    started.set()
        assert line == "" or line == "data: [DONE]"
    return text


def test_streams_go_on_when_the_engine_is_killed(moody_server: LiveServer, llm: LLM) -> None:
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=150, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    wanted = expected(llm, PROMPTS, params)

    async def run() -> tuple[list[str], float]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=moody_server.url, timeout=60, limits=limits) as client:
            started = [asyncio.Event() for _ in PROMPTS]
            streams = [
                asyncio.ensure_future(
                    stream(
                        client,
                        {
                            "prompt": prompt,
                            "temperature": each.temperature,
                            "seed": each.seed,
                            "max_tokens": 150,
                            "ignore_eos": True,
                        },
                        event,
                    )
                )
                for prompt, each, event in zip(PROMPTS, params, started, strict=True)
            ]
            for event in started:
                await event.wait()
            assert not any(task.done() for task in streams)
            killed_s = time.monotonic()
            moody_server.engine.kill()
            texts = await asyncio.gather(*streams)
            return texts, time.monotonic() - killed_s

    texts, _ = asyncio.run(run())
    assert texts == wanted
    assert moody_server.metric("headrace_engine_restarts_total") == 1
    moody_server.wait_idle()


def test_a_request_that_kills_engines_fails_alone(moody_server: LiveServer, llm: LLM) -> None:
    prompts = PROMPTS[:7]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    wanted = expected(llm, prompts, [params] * len(prompts))

    async def run() -> tuple[list[str], httpx.Response]:
        async with httpx.AsyncClient(base_url=moody_server.url, timeout=120) as client:
            body = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
            good = [asyncio.ensure_future(stream(client, {"prompt": prompt, **body})) for prompt in prompts]
            bad = await client.post("/v1/completions", json={"prompt": DEADLY, **body})
            return await asyncio.gather(*good), bad

    texts, bad = asyncio.run(run())
    assert texts == wanted
    assert bad.status_code == 500 and bad.json()["error"]["code"] == "poison_request"
    assert "exit code 1" in bad.json()["error"]["message"]
    assert moody_server.metric("headrace_poison_requests_total") == 1
    assert moody_server.metric("headrace_engine_restarts_total") <= 6
    assert moody_server.post("/v1/completions", {"prompt": "still here"}).status_code == 200


def test_streams_go_on_when_the_engine_hangs(model_folder: Path, moody: dict[str, str], llm: LLM) -> None:
    """SIGSTOP: the process is there, its socket too, and it makes no step."""
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    wanted = expected(llm, PROMPTS[:4], [params] * 4)
    env = {**moody, "HEADRACE_LOAD_FORMAT": "dummy", "HEADRACE_KV_MEMORY": "32MiB"}
    env |= {"HEADRACE_STALL_TIMEOUT_S": "1", "HEADRACE_STALL_RESTART_S": "2"}
    with LiveServer(model_folder, env=env, device="moody") as server:
        pid = server.engine.pid

        async def run() -> list[str]:
            async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
                body = {"max_tokens": 150, "temperature": 0, "ignore_eos": True}
                started = [asyncio.Event() for _ in wanted]
                streams = [
                    asyncio.ensure_future(stream(client, {"prompt": prompt, **body}, event))
                    for prompt, event in zip(PROMPTS, started, strict=False)
                ]
                for event in started:
                    await event.wait()
                server.engine.suspend()
                return await asyncio.gather(*streams)

        assert asyncio.run(run()) == wanted
        assert server.engine.pid != pid
        assert server.metric("headrace_engine_restarts_total") >= 1
        assert httpx.get(f"{server.url}/readyz").status_code == 200
        server.wait_idle()


def test_an_idle_engine_that_hangs_is_noticed_and_replaced(model_folder: Path) -> None:
    env = {"HEADRACE_STALL_TIMEOUT_S": "1", "HEADRACE_STALL_RESTART_S": "3"}
    with LiveServer(model_folder, "--kv-memory", "8MiB", env=env) as server:
        server.engine.suspend()
        seen: set[int] = set()
        deadline_s = time.monotonic() + 30
        while server.metric("headrace_engine_restarts_total") < 1:
            seen |= {httpx.get(f"{server.url}{path}").status_code for path in ("/livez", "/readyz")}
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        assert seen == {200, 503}
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
        time.sleep(1.5)  # an idle engine that is there is left alone
        assert server.metric("headrace_engine_restarts_total") == 1


def test_a_step_that_fails_costs_one_request(moody_server: LiveServer, llm: LLM) -> None:
    bad = moody_server.post("/v1/completions", {"prompt": FAILING, "max_tokens": 5})
    assert bad.status_code == 500
    assert moody_server.post("/v1/completions", {"prompt": "still here"}).status_code == 200
    assert moody_server.metric("headrace_engine_restarts_total") == 0


@pytest.mark.slow
def test_stalls_pings_and_timeouts(model_folder: Path, moody: dict[str, str]) -> None:
    env = {**moody, "HEADRACE_LOAD_FORMAT": "dummy", "HEADRACE_KV_MEMORY": "8MiB"}
    env |= {"HEADRACE_STALL_TIMEOUT_S": "1", "HEADRACE_PING_INTERVAL_S": "1"}
    env["HEADRACE_REQUEST_TIMEOUT_S"] = "5"
    with LiveServer(model_folder, env=env, device="moody") as server:
        body = {"prompt": SLOW, "stream": True, "max_tokens": 2}
        started_s = time.monotonic()
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as response:
            time.sleep(max(0.0, started_s + 2 - time.monotonic()))
            ready = httpx.get(f"{server.url}/readyz")
            assert ready.status_code == 503 and "stalled" in ready.json()["reason"]
            assert httpx.get(f"{server.url}/livez").status_code == 503
            text = "".join(response.iter_text())
        assert text.startswith(": ping\n\n")
        assert text.endswith("data: [DONE]\n\n")
        assert httpx.get(f"{server.url}/readyz").status_code == 200

        endless = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}
        late = server.post("/v1/completions", endless)
        assert late.status_code == 504 and late.json()["error"]["code"] == "request_timeout"
        text = server.post("/v1/completions", {**endless, "stream": True}).text
        last = [part for part in text.split("\n\n") if part][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"
        server.wait_idle()


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_frees_its_blocks(moody_server: LiveServer, is_stream: bool) -> None:
    # With a seed, or chance might write what the platform fails on.
    asked = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "n": 4, "seed": 1, "stream": is_stream}
    body = json.dumps(asked).encode()
    with socket.create_connection(("127.0.0.1", httpx.URL(moody_server.url).port or 0)) as sock:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        deadline_s = time.monotonic() + 30
        while moody_server.metric("vllm:num_requests_running") < 4:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        assert moody_server.metric("headrace_kv_blocks_free") < moody_server.metric("headrace_kv_blocks")
    moody_server.wait_for("aborted by client")
    moody_server.wait_idle(2)


def test_sigterm_lets_streams_finish(moody_server: LiveServer, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    (wanted,) = expected(llm, PROMPTS[:1], [params])

    async def run() -> str:
        async with httpx.AsyncClient(base_url=moody_server.url, timeout=60) as client:
            started = asyncio.Event()
            body = {"prompt": PROMPTS[0], "max_tokens": 200, "temperature": 0, "ignore_eos": True}
            task = asyncio.ensure_future(stream(client, body, started))
            await started.wait()
            moody_server.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.3)
            async with httpx.AsyncClient(base_url=moody_server.url) as other:
                with pytest.raises(httpx.ConnectError):
                    await other.get("/readyz")
            return await task

    assert asyncio.run(run()) == wanted
    assert moody_server.process.wait(20) == 0


def test_the_drain_has_a_deadline(model_folder: Path, moody: dict[str, str]) -> None:
    env = {**moody, "HEADRACE_LOAD_FORMAT": "dummy", "HEADRACE_KV_MEMORY": "8MiB", "HEADRACE_DRAIN_TIMEOUT_S": "1"}
    with LiveServer(model_folder, env=env, device="moody") as server:
        body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as response:
            parts = response.iter_text()
            next(parts)
            server.process.send_signal(signal.SIGTERM)
            text = "".join(parts)
        assert '"code":"shutting_down"' in text and "[DONE]" not in text
        assert server.process.wait(10) == 0


def test_ctrl_c_twice_ends_at_once(moody_server: LiveServer) -> None:
    body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    engine = moody_server.engine
    with httpx.stream("POST", f"{moody_server.url}/v1/completions", json=body, timeout=30) as response:
        parts = response.iter_text()
        next(parts)
        moody_server.process.send_signal(signal.SIGINT)
        moody_server.wait_for("draining")
        moody_server.process.send_signal(signal.SIGINT)
        assert '"code":"shutting_down"' in "".join(parts)
    assert moody_server.process.wait(10) == 130
    assert not engine.is_running()


def test_the_engine_ends_with_its_front(model_folder: Path) -> None:
    with LiveServer(model_folder, "--kv-memory", "8MiB") as server:
        engine = server.engine
        server.process.kill()
        engine.wait(10)


def test_a_client_that_never_reads_is_given_up(model_folder: Path) -> None:
    env = {"HEADRACE_SEND_TIMEOUT_S": "1"}
    with LiveServer(model_folder, "--kv-memory", "64MiB", env=env) as server:
        body = {"prompt": "x", "max_tokens": 4000, "n": 16, "ignore_eos": True, "stream": True, "logprobs": 5}
        data = json.dumps(body).encode()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", httpx.URL(server.url).port or 0))
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
            sock.sendall(head.encode() + data)
            server.wait_for("aborted by client", 30)
            assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200
            server.wait_idle()
        assert not [line for line in server.lines if "Traceback" in line]


def test_many_idle_connections_and_no_more_files(model_folder: Path) -> None:
    with LiveServer(model_folder, "--kv-memory", "8MiB") as server:
        address = ("127.0.0.1", httpx.URL(server.url).port or 0)
        idle = [socket.create_connection(address) for _ in range(500)]
        assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200
        for sock in idle:
            sock.close()
        import resource

        import psutil

        psutil.Process(server.process.pid).rlimit(resource.RLIMIT_NOFILE, (48, 48))
        many = [socket.create_connection(address) for _ in range(80)]
        time.sleep(0.5)
        for sock in many:
            sock.close()
        deadline_s = time.monotonic() + 20
        while True:
            try:
                response = server.post("/v1/completions", {"prompt": "x"})
            except httpx.TransportError:
                assert time.monotonic() < deadline_s
                continue
            assert response.status_code == 200
            break
