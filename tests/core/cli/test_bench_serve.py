"""bench serve: what its client makes of streams, percentiles against numpy, arrivals, files, and whole runs."""

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.core.cli import bench_plot, exits
from headrace.core.cli.bench_client import Sample, Target
from headrace.core.cli.bench_serve import (
    Goodput,
    Level,
    Request,
    Round,
    figures,
    mixed,
    percentiles,
    poisson_gaps,
    ratios,
    read_requests,
    run_round,
    salted,
    synthetic,
)
from headrace.core.errors import ConfigError
from live_server import LiveServer
from tiny_server_model import tiny_server_model

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(event: Any) -> bytes:
    """An event as a chunk of the transfer encoding."""
    data = event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


def token(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    """An event of completions."""
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}], "usage": None}


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}
DONE = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def with_server(handler: Handler, use: Callable[[Target], Awaitable[Any]]) -> Any:
    """What `use` gives, with a server whose connections `handler` answers."""
    tasks = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        with contextlib.suppress(ConnectionError):
            try:
                await handler(reader, writer)
            finally:
                writer.close()
                await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        result = await use(Target(f"127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"))
        await asyncio.gather(*filter(None, tasks))
    return result


async def read_request(reader: asyncio.StreamReader) -> dict[str, Any]:
    """The body of a request."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.split("content-length: ")[1].split("\r\n")[0])
    body: dict[str, Any] = json.loads(await reader.readexactly(length))
    return body


def sample_of(pieces: Sequence[bytes], *, path: str = "/completions") -> Sample:
    """What the client makes of a response that comes in these pieces, 10 ms apart."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)

    async def use(target: Target) -> Sample:
        return await target.post(path, {"prompt": "x"}, 5)

    found: Sample = asyncio.run(with_server(handler, use))
    return found


def test_tokens_and_their_times() -> None:
    whole = chunk(token("b")) + chunk(b": ping\n\n")
    sample = sample_of(
        [HEAD, chunk(token("a")), whole[:20], whole[20:], chunk(token("", "length")) + chunk(USAGE), DONE]
    )
    assert sample.error == ""
    assert (len(sample.token_s), sample.num_prompt_tokens, sample.num_output_tokens) == (2, 7, 5)
    assert 0.005 < sample.ttft_s < sample.e2e_s
    assert sample.tpot_s == pytest.approx(sample.itl_s[0] / 4)  # four tokens came after the first event's one


def test_chat_events_with_text_only_count() -> None:
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, {"reasoning": "hm"}, {"content": "a"}, {}]
    events = [chunk({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas]
    sample = sample_of([HEAD, *events, DONE])
    assert sample.error == "" and len(sample.token_s) == sample.num_output_tokens == 2


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([b"HTTP/1.1 429 No\r\ncontent-length: 31\r\n\r\n", b'{"error": {"message": "queue"}}'], "HTTP 429: queue"),
        ([HEAD, chunk(token("a")), chunk({"error": {"message": "died"}}), b"0\r\n\r\n"], "in the stream: died"),
        ([HEAD, chunk(token("a"))], "the connection broke off"),
        ([HEAD, chunk(token("a")), b"0\r\n\r\n"], "the stream ended without [DONE]"),
        ([HEAD, chunk(b"data: {\n\n"), DONE], "an event that is no chunk"),
        ([HEAD, DONE], "no token came"),
        ([b"garbage\r\n\r\n"], "not HTTP"),
    ],
)
def test_requests_that_fail(pieces: Sequence[bytes], error: str) -> None:
    assert sample_of(pieces).error.startswith(error)


def test_no_server_and_no_end() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def use(target: Target) -> str:
        return (await target.post("/completions", {}, 0.1)).error

    assert asyncio.run(with_server(silent, use)) == "no end within 0.1 s"
    assert asyncio.run(Target("127.0.0.1:9").post("/completions", {}, 5)).error.startswith("no connection")
    with pytest.raises(ConfigError, match="is not an address"):
        Target("ftp://x")


def test_percentiles_are_numpys() -> None:
    values = np.random.default_rng(1).lognormal(size=37)
    found = percentiles(list(values))
    assert found["mean"] == pytest.approx(1e3 * values.mean())
    for percent in (50, 90, 95, 99):
        assert found[f"p{percent}"] == pytest.approx(1e3 * np.percentile(values, percent))
    assert percentiles([]) == {} and percentiles([0.5])["p99"] == 500


def make_sample(*token_s: float, error: str = "") -> Sample:
    """A request that began at 10 s."""
    return Sample(
        started_s=10, token_s=list(token_s), num_prompt_tokens=4, num_output_tokens=len(token_s), error=error
    )


def test_figures_and_goodput() -> None:
    samples = [make_sample(10.1, 10.2, 10.3), make_sample(10.5, 10.6), make_sample(10.1, error="HTTP 500: x")]
    found = figures(Round(wall_s=2.0, cpu_s=0.1, samples=samples), Goodput.parse("ttft:200, tpot:150"))
    assert (found["requests"], found["errors"], found["requests_per_s"]) == (3, {"HTTP 500: x": 1}, 1.0)
    assert (found["output_tokens"], found["output_tokens_per_s"], found["total_tokens_per_s"]) == (5, 2.5, 6.5)
    assert found["ttft_ms"]["p50"] == pytest.approx(300)
    assert found["itl_ms"]["mean"] == pytest.approx(100)
    assert found["tpot_ms"]["mean"] == pytest.approx(100)
    assert found["e2e_ms"]["mean"] == pytest.approx(450)
    assert found["goodput"] == {"requests_per_s": 0.5, "share": pytest.approx(1 / 3)}
    with pytest.raises(ConfigError, match="write ttft:MS"):
        Goodput.parse("ttlt:5")


def test_ratios_say_how_many_times_better() -> None:
    def level(rate: float, ms: float) -> dict[str, Any]:
        times = {name: {"p50": ms, "p95": 2 * ms} for name in ("ttft_ms", "itl_ms", "tpot_ms")}
        return {"concurrency": 1, "rate": None, "output_tokens_per_s": rate, **times, "e2e_ms": {}}

    (row,) = ratios([level(30, 10)], [level(10, 50)])
    assert row["output_tokens_per_s"] == 3 and row["ttft_ms"] == {"p50": 5, "p95": 5} and "e2e_ms" not in row


def arrivals(level: Level, count: int, hold_s: float) -> tuple[list[float], int]:
    """How long after the start each request was sent to a server that answers after hold_s, and how many were there
    at a time."""
    now = most = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal now, most
        await read_request(reader)
        now += 1
        most = max(most, now)
        await asyncio.sleep(hold_s)
        now -= 1
        writer.write(HEAD + chunk(token("a")) + DONE)

    async def use(target: Target) -> tuple[float, Round]:
        requests = synthetic(count, 3, 1, 0, vocab_size=100, seed=0)
        started_s = time.perf_counter()
        return started_s, await run_round(target, level, requests, common={"model": "m"}, seed=3, timeout_s=60)

    started_s, done = asyncio.run(with_server(handler, use))
    assert len(done.samples) == count and not any(sample.error for sample in done.samples)
    return sorted(sample.started_s - started_s for sample in done.samples), most


def test_fixed_concurrency() -> None:
    times, most = arrivals(Level(concurrency=5), 23, 0.01)
    assert len(times) == 23 and most == 5


def test_poisson_gaps() -> None:
    gaps = np.array(list(itertools.islice(poisson_gaps(400, seed=3), 20_000)))
    # Exponential: mean and standard deviation are 1 / rate, a share of exp(-x) is longer than x / rate.
    assert gaps.mean() == pytest.approx(1 / 400, rel=0.03) and gaps.std() == pytest.approx(1 / 400, rel=0.03)
    for x in (0.1, 1, 3):
        assert (gaps > x / 400).mean() == pytest.approx(np.exp(-x), abs=0.01)
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03


def test_poisson_arrivals() -> None:
    times, most = arrivals(Level(rate=400), 200, 0.05)
    due = [0.0, *itertools.accumulate(itertools.islice(poisson_gaps(400, seed=3), 199))]
    # A busy machine sends late, and nothing sends early. Answers are not waited for.
    assert all(time_s > due_s - 1e-3 for time_s, due_s in zip(times, due, strict=True))
    assert most > 5


def test_synthetic_and_mixed_requests() -> None:
    fixed = synthetic(10, 128, 64, 0, vocab_size=5000, seed=1)
    assert {len(request.body["prompt"]) for request in fixed} == {128}
    assert all(1000 <= token < 5000 for request in fixed for token in request.body["prompt"])
    assert fixed[0].body["max_tokens"] == fixed[0].body["min_tokens"] == 64 and fixed[0].body["ignore_eos"]
    lengths = [len(r.body["prompt"]) for r in synthetic(500, 100, 64, 0.5, vocab_size=5000, seed=1)]
    assert min(lengths) >= 50 and max(lengths) <= 150 and 95 < np.mean(lengths) < 105
    lengths = [len(r.body["prompt"]) for r in mixed(2000, vocab_size=5000, seed=1)]
    assert min(lengths) == 16 and max(lengths) == 1024 and 100 < np.median(lengths) < 125


def test_salts_change_what_a_prefix_cache_sees() -> None:
    shared = list(range(10, 40))
    requests = [Request(path="/completions", body={"prompt": [*shared, i]}) for i in range(3)]
    requests += [Request(path="/completions", body={"prompt": "text"})]
    requests += [Request(path="/chat/completions", body={"messages": [{"role": "user", "content": "hi"}]})]
    first, second = salted(requests, 5), salted(requests, 6)
    heads = {tuple(request.body["prompt"][:30]) for request in first[:3]}
    assert len(heads) == 1 and {tuple(request.body["prompt"][:30]) for request in second[:3]}.isdisjoint(heads)
    assert all(len(a.body["prompt"]) == len(b.body["prompt"]) for a, b in zip(requests[:3], first, strict=False))
    assert all(max(request.body["prompt"]) <= 39 for request in first[:3])
    assert first[3].body["prompt"] == "(5) text" and second[4].body["messages"][0]["content"] == "(6) hi"
    assert requests[4].body["messages"][0]["content"] == "hi"


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    lines = [
        {"prompt": "a", "max_tokens": 3},
        {"custom_id": "1", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "x"}]}},
        {"p": [1, 2], "n": 5},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    found = read_requests(file, "W5")
    assert [request.path for request in found] == ["/completions", "/chat/completions", "/completions"]
    assert found[0].body == lines[0] and found[2].body["prompt"] == [1, 2] and found[2].body["max_tokens"] == 5
    file.write_text(json.dumps({"W5": [{"p": [3], "n": 2}], "W1": [[{"p": [1], "n": 1}]]}))
    assert [request.body["prompt"] for request in read_requests(file, "W5")] == [[3]]
    for content, select, reason in (
        ('{"W1": []}', "W5", "has no workload 'W5'; it has W1"),
        ("{", "W5", "is neither JSON nor JSON lines"),
        ('{"x": 1, "prompt": "a"}\n[]', "W5", "request 2 has neither"),
        ("", "W5", "holds no request"),
    ):
        file.write_text(content)
        with pytest.raises(ConfigError, match=reason):
            read_requests(file, select)


def test_no_point_of_a_picture_is_cut(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(bench_plot, "save_figure", lambda figure, path: drawn.append(figure))
    levels = [
        {
            "concurrency": number, "rate": None, "output_tokens_per_s": 3.0 * number,
            "ttft_ms": {"p50": number, "p95": 2 * number}, "itl_ms": {"p50": number, "p95": 5 * number},
        }
        for number in (1, 8, 32)
    ]  # fmt: skip
    bench_plot.draw_serve({"servers": {"headrace": levels}, "models": {"headrace": "tiny"}}, tmp_path / "a.png")
    drawn[0].canvas.draw()
    for axes, highest in zip(drawn[0].axes, (96, 64, 160), strict=True):
        low, high = axes.get_ylim()
        assert low == 0 and 1.04 * highest < high < 1.3 * highest


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, LiveServer]]:
    """A model and a server of it."""
    folder = tiny_server_model(tmp_path_factory.mktemp("served") / "tiny")
    with LiveServer(folder, "--kv-memory", "16MiB") as server:
        yield folder, server


def test_two_servers_by_turns(
    served: tuple[Path, LiveServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, server = served
    png, copy = tmp_path / "a.png", tmp_path / "a.json"
    arguments = ["bench", "serve", str(folder), "--device", "null", "--load-format", "dummy", "--kv-memory", "16MiB"]
    arguments += ["--concurrency", "1,3", "--num-requests", "6", "--input-len", "20", "--output-len", "8"]
    arguments += ["--versus", server.url, "--repeat", "2", "--vocab-size", "300", "--goodput", "ttft:60000"]
    arguments += ["--png", str(png), "--output", str(copy), "--json"]
    before = server.metrics()
    assert exits.run(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert json.loads(copy.read_bytes()) == result
    assert png.read_bytes().startswith(b"\x89PNG\r\n")
    assert list(result["servers"]) == ["headrace", "versus"] and result["models"]["versus"] == "tiny"
    for levels in result["servers"].values():
        assert [(level["concurrency"], level["requests"], level["errors"]) for level in levels] == [
            (1, 12, {}),
            (3, 12, {}),
        ]
        for level in levels:
            assert [round_["output_tokens"] for round_ in level["rounds"]] == [48, 48]
            assert level["goodput"]["share"] == 1 and level["ttft_ms"]["p50"] > 0
    assert len(result["ratios"]) == 2 and result["ratios"][0]["ttft_ms"]["p50"] > 0
    after = server.metrics()
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == 2 * 2 * 48 + 4
    assert after["vllm:prefix_cache_hits_total"] == before["vllm:prefix_cache_hits_total"]


def test_a_table_for_a_server_that_runs(served: tuple[Path, LiveServer], capsys: pytest.CaptureFixture[str]) -> None:
    _, server = served
    arguments = ["bench", "serve", "--url", server.url, "--rate", "50", "--num-requests", "10"]
    assert exits.run([*arguments, "--workload", "w5", "--vocab-size", "300"]) == 0
    out = capsys.readouterr().out
    assert "server: tiny" in out and "50 a second" in out and "no errors" in out
    # The vocabulary that is assumed is larger than this model's: every request is an error, and shown.
    assert exits.run(arguments) == 0
    assert "10 x HTTP 400: token id" in capsys.readouterr().out
    assert exits.run([*arguments, "--vocab-size", "300", "--body", '{"temperature": -1}']) == 0
    assert "10 x HTTP 400: temperature must be 0 or more" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--rate", "1", "--concurrency", "1"], "two ways to make load"),
        (["--rate", "0"], "numbers above 0"),
        (["--rate", "nan"], "numbers above 0"),
        (["--rate", "inf"], "numbers above 0"),
        (["--timeout-s", "0"], "--timeout-s must be above 0, got 0"),
        (["--timeout-s", "nan"], "--timeout-s must be above 0, got nan"),
        (["--output", "/proc/nowhere/x.json"], "cannot write /proc/nowhere/x.json: No such file"),
        (["--png", "/"], "cannot write /: Is a directory"),
        (["--concurrency", "a"], "whole numbers"),
        (["--body", "[]"], "not a JSON object"),
        (["--workload", "/no/such.jsonl"], "cannot read the workload"),
        (["--goodput", "x"], "write ttft:MS"),
    ],
)
def test_wrong_options(capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str) -> None:
    assert exits.run(["bench", "serve", "--url", "127.0.0.1:9", *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_no_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert exits.run(["bench", "serve", "--url", "127.0.0.1:9", "--png", "x.png"]) == 5
    error = capsys.readouterr().err
    assert "needs matplotlib" in error and "pip install 'headrace[bench]'" in error
