"""Keys, queue limits, sizes of bodies, TLS, CORS, busy ports: what a server refuses, and how."""

import json
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import psutil
import pytest

from headrace.core.config import ServerConfig
from headrace.core.errors import ConfigError
from headrace.core.server import run
from headrace.core.server.app import route_table
from headrace.core.server.auth import PUBLIC_ROUTES, read_keys
from live_server import LiveServer
from moody_platform import install


@pytest.fixture(scope="module")
def guarded(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with keys and CORS, one slot and a queue of two; its steps take 2 ms."""
    folder = tmp_path_factory.mktemp("guarded")
    keys = folder / "keys"
    keys.write_text("# users\nalpha\n\nbeta\n")
    env = install(folder / "site", step_s=0.002)
    env |= {"HEADRACE_MAX_BODY_BYTES": "100000", "HEADRACE_LOAD_FORMAT": "dummy", "HEADRACE_API_KEY": "master"}
    arguments = ["--api-key-file", str(keys), "--kv-memory", "8MiB", "--max-num-seqs", "1"]
    env |= {"HEADRACE_MAX_QUEUE_REQUESTS": "8"}
    arguments += ["--cors-origins", "https://a.example", "--served-model-name", "m1, m2"]
    with LiveServer(model_folder, *arguments, env=env, device="moody") as server:
        yield server


def auth(key: str) -> dict[str, Any]:
    """Keyword arguments of a request with this key."""
    return {"headers": {"authorization": f"Bearer {key}"}}


def test_every_route_needs_a_key_but_a_few(guarded: LiveServer) -> None:
    specs = [(spec.method, spec.path.replace("{name:path}", "m1")) for spec in route_table()]
    assert len(PUBLIC_ROUTES) == 6
    for method, path in [*specs, ("GET", "/index.html"), ("GET", "/nope"), ("GET", "/livez/"), ("GET", "//livez")]:
        response = httpx.request(method, guarded.url + path)
        if path in PUBLIC_ROUTES:
            assert response.status_code == 200, path
        else:
            assert response.status_code == 401, path
            name, value = (
                ("type", "authentication_error") if path[:12] == "/v1/messages" else ("code", "invalid_api_key")
            )
            assert response.json()["error"][name] == value
            assert response.headers["www-authenticate"] == "Bearer"


def test_the_description_says_which_routes_need_a_key(guarded: LiveServer) -> None:
    found = httpx.get(f"{guarded.url}/openapi.json").json()
    assert found["security"] == [{"key": []}]
    for path, operations in found["paths"].items():
        assert all(("security" in operation) == (path in PUBLIC_ROUTES) for operation in operations.values()), path


@pytest.mark.parametrize("key", ["alpha", "beta", "master"])
def test_keys_of_file_and_option(guarded: LiveServer, key: str) -> None:
    assert httpx.get(f"{guarded.url}/v1/models", **auth(key)).status_code == 200
    assert httpx.get(f"{guarded.url}/v1/models", headers={"x-api-key": key}).status_code == 200


@pytest.mark.parametrize("key", ["-", "alph", "alphaa", "# users", "ALPHA"])
def test_wrong_keys(guarded: LiveServer, key: str) -> None:
    assert httpx.get(f"{guarded.url}/v1/models", **auth(key)).status_code == 401


def test_clients_tell_a_wrong_key(guarded: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_keys_of_anthropics_client(guarded: LiveServer) -> None:
    ask: Any = {"max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
    with anthropic.Anthropic(base_url=guarded.url, api_key="wrong", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError) as wrong:
            client.messages.create(model="m1", **ask)
        assert wrong.value.type == "authentication_error"
    with anthropic.Anthropic(base_url=guarded.url, api_key="alpha", max_retries=0) as client:
        assert client.messages.create(model="m1", **ask).role == "assistant"


def test_names_of_the_model(guarded: LiveServer) -> None:
    listed = httpx.get(f"{guarded.url}/v1/models", **auth("alpha")).json()["data"]
    assert [card["id"] for card in listed] == ["m1", "m2"]
    for name, status in (("m1", 200), ("m2", 200), ("tiny", 404)):
        body = {"model": name, "prompt": "x", "max_tokens": 1}
        assert guarded.post("/v1/completions", body, **auth("alpha")).status_code == status


def test_cors(guarded: LiveServer) -> None:
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    for origin, allowed in (("https://a.example", True), ("https://b.example", False)):
        response = httpx.options(f"{guarded.url}/v1/completions", headers={"origin": origin, **ask})
        assert ("access-control-allow-origin" in response.headers) == allowed


def test_no_cors_unless_asked_for(server: LiveServer) -> None:
    response = httpx.get(f"{server.url}/v1/models", headers={"origin": "https://a.example"})
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_a_full_queue_says_when_to_come_back(guarded: LiveServer) -> None:
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}
    statuses: list[httpx.Response] = []

    def ask(key: str) -> None:
        statuses.append(guarded.post("/v1/completions", body, **auth(key)))

    threads = [threading.Thread(target=ask, args=(key,)) for key in ["alpha"] * 9 + ["beta"] * 2]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    refused = [response for response in statuses if response.status_code != 200]
    assert refused and len(refused) < 9
    for response in refused:
        assert response.status_code == 429
        assert 1 <= int(response.headers["retry-after"]) <= 120
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert response.json()["error"]["code"] in ("queue_full", "key_queue_full")
    assert all(response.request.headers["authorization"] == "Bearer alpha" for response in refused)


@pytest.mark.parametrize("body", [{"n": 10**9}, {"n": 5000}])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_too_many_completions_cost_nothing(guarded: LiveServer, path: str, body: dict[str, Any]) -> None:
    front = psutil.Process(guarded.process.pid)
    before = front.memory_info().rss
    ask = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    answer = guarded.post(path, {**ask, **body}, **auth("alpha"))
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "too_many_completions"
    assert front.memory_info().rss - before < 16 * 2**20


def test_very_many_prompts_are_refused_before_they_are_tokenized(guarded: LiveServer) -> None:
    answer = guarded.post("/v1/completions", {"prompt": ["a"] * 20_000}, **auth("alpha"))
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "too_many_completions"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", lambda text: {"prompt": text}),
        ("/v1/completions", lambda text: {"prompt": ["x", text], "stream": True}),
        ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}),
        ("/v1/responses", lambda text: {"input": text}),
        ("/v1/messages", lambda text: {"max_tokens": 1, "messages": [{"role": "user", "content": text}]}),
        ("/tokenize", lambda text: {"prompt": text}),
    ],
)
def test_a_huge_text_costs_little(server: LiveServer, path: str, body: Callable[[str], Any]) -> None:
    front = psutil.Process(server.process.pid)
    before = front.memory_info().rss
    answer = server.post(path, body("word " * 2_000_000))
    assert answer.status_code == 400 and "4096 tokens" in answer.json()["error"]["message"], answer.text
    assert front.memory_info().rss - before < 128 * 2**20  # its tokens would take 700 MB


def test_a_key_waits_for_one_round_of_another(model_folder: Path, tmp_path: Path) -> None:
    """Two slots, and a key that asks for many completions, in one request or in several."""
    keys = tmp_path / "keys"
    keys.write_text("greedy\nmodest\n")
    env = {**install(tmp_path / "site", step_s=0.01), "HEADRACE_LOAD_FORMAT": "dummy"}
    arguments = ["--api-key-file", str(keys), "--kv-memory", "8MiB", "--max-num-seqs", "2"]
    length = {"max_tokens": 50, "ignore_eos": True}  # half a second
    with LiveServer(model_folder, *arguments, env=env, device="moody") as server:
        for number, n in ((1, 12), (12, 1)):
            asked = {"prompt": "x", "n": n, **length}
            threads = [
                threading.Thread(target=server.post, args=("/v1/completions", asked), kwargs=auth("greedy"))
                for _ in range(number)
            ]
            for thread in threads:
                thread.start()
            time.sleep(0.3)
            answer = server.post("/v1/completions", {"prompt": "y", **length}, **auth("modest")).json()
            # Both slots are taken; one round ends within half a second, two take one.
            assert answer["timings"]["queue_s"] < 0.8, answer["timings"]
            for thread in threads:
                thread.join()


def test_bodies_that_are_too_large(guarded: LiveServer) -> None:
    url = f"{guarded.url}/v1/completions"
    small = httpx.post(url, content=b" " * 100_001, **auth("alpha"))
    assert small.status_code == 413 and "100001" in small.json()["error"]["message"]

    def endless() -> Iterator[bytes]:
        for _ in range(1000):
            yield b" " * 100_000

    large = httpx.post(url, content=endless(), timeout=60, **auth("alpha"))  # 100 MB, of unknown length
    assert large.status_code == 413 and large.json()["error"]["code"] == "body_too_large"
    known = httpx.post(url, content=b" " * 100_000_000, timeout=60, **auth("alpha"))
    assert known.status_code == 413


def test_not_http_gets_the_envelope(guarded: LiveServer) -> None:
    url = httpx.URL(guarded.url)
    with socket.create_connection((url.host, url.port or 0)) as sock:
        sock.sendall(b"hello there\r\n\r\n")
        answer = b"".join(iter(lambda: sock.recv(4096), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and json.loads(body)["error"]["code"] == "invalid_http"


def test_a_busy_port(model_folder: Path, guarded: LiveServer) -> None:
    port = httpx.URL(guarded.url).port or 0
    second = LiveServer(model_folder, port=port, wait=False)
    assert second.process.wait(30) == 6
    second.close()
    assert any(f"port {port} on 127.0.0.1 is in use" in line for line in second.lines)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--tls-cert", "x.pem"], 2, "both"),
        (["--api-key-file", "/nope"], 2, "cannot be read"),
        (["--host", "no.such.host.invalid"], 2, "'no.such.host.invalid' is no address"),
        (["--host", ""], 2, "'' is no address"),
        (["--host", "a" * 70 + ".invalid"], 2, "is no address"),
        (["--api-key", "two words"], 2, "api_key: a key is printable ASCII without blanks"),
        (["--api-key", "schl\u00fcssel"], 2, "api_key: a key is printable ASCII without blanks"),
        (["--cors-origins", "https://a.example, b.example"], 2, "cors-origins must be * or origins"),
        (["--cors-origins", "https://a.example/"], 2, "cors-origins must be * or origins"),
        (["--chat-template", "/nope"], 3, "the chat template /nope cannot be read: No such file or directory"),
        (["--kv-memory", "1KiB"], 4, "does not fit"),
    ],
)
def test_servers_that_do_not_start(model_folder: Path, arguments: list[str], code: int, text: str) -> None:
    server = LiveServer(model_folder, *arguments, wait=False)
    try:
        assert server.process.wait(60) == code
    finally:
        server.close()
    assert any(text in line for line in server.lines), server.lines


def test_tls_files_that_are_none(tmp_path: Path) -> None:
    cert, key = _certificate(tmp_path)
    junk, other, locked = tmp_path / "junk.pem", tmp_path / "other.pem", tmp_path / "locked.pem"
    junk.write_text("junk")
    for arguments in (
        ["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-out", str(other)],
        ["pkey", "-in", str(key), "-aes256", "-passout", "pass:x", "-out", str(locked)],
    ):
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)
    for pair, problem in (
        ((junk, junk), f"tls_cert {junk} and tls_key {junk} cannot be used"),
        ((cert, junk), f"tls_cert {cert} and tls_key {junk} cannot be used"),
        ((cert, other), f"tls_key {other} cannot be used: KEY_VALUES_MISMATCH"),
        ((cert, locked), f"tls_key: {locked} is encrypted"),
        ((cert, tmp_path), f"tls_key: {tmp_path} cannot be read: Is a directory"),
        ((tmp_path / "nothing", key), "nothing cannot be read: No such file or directory"),
    ):
        with pytest.raises(ConfigError) as error:
            run.check_tls(ServerConfig(tls_cert=str(pair[0]), tls_key=str(pair[1])))
        assert problem in str(error.value)


def test_a_server_that_ends_by_itself_is_no_server(model_folder: Path) -> None:
    """A failure of the HTTP part ends the process, with its reason."""
    program = """
import asyncio
import headrace.core.server.run as run
from headrace.core.cli import main
async def serve(self, sockets=None):
    await asyncio.sleep(float(WAIT))
    raise ValueError("no more")
run._HttpServer.serve = serve
main()
"""
    options = ["--device", "null", "--load-format", "dummy", "--port", "0"]
    for wait in ("0", "5"):  # while it loads, and while it serves
        command = [sys.executable, "-c", program.replace("WAIT", wait), "serve", str(model_folder), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, "internal error: ValueError: no more" in done.stderr) == (1, True), done.stderr


def test_keys_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\ngood-key\n\nbad key\n")
    with pytest.raises(ConfigError, match=f"line 4 of {path}: a key is printable ASCII") as error:
        read_keys(ServerConfig(api_key_file=str(path)))
    assert "bad key" not in str(error.value)


def _certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of this machine and its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-keyout",
            key,
            "-out",
            cert,
        ],
        check=True,
        capture_output=True,
    )
    return cert, key


def test_tls(model_folder: Path, tmp_path: Path) -> None:
    cert, key = _certificate(tmp_path)
    arguments = ["--tls-cert", str(cert), "--tls-key", str(key), "--kv-memory", "8MiB"]
    with LiveServer(model_folder, *arguments) as server:
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=str(cert))
        assert httpx.get(f"{server.url}/readyz", verify=context).status_code == 200


def test_everyone_may_come_in_is_a_warning(model_folder: Path) -> None:
    with LiveServer(model_folder, "--host", "0.0.0.0", "--kv-memory", "8MiB") as server:
        assert any("warning" in line and "--api-key" in line for line in server.lines)


def test_very_many_tools_do_not_hold_up_the_loop(server: LiveServer) -> None:
    front = psutil.Process(server.process.pid)
    before = sum(front.cpu_times()[:2])
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(40_000)]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": "none", "max_tokens": 1}
    assert server.post("/v1/chat/completions", body).status_code == 200
    assert sum(front.cpu_times()[:2]) - before < 5  # comparing each name with all others would take 20 s


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", lambda turns: {"messages": turns}),
        ("/v1/responses", lambda turns: {"input": turns}),
        ("/v1/responses", lambda turns: {"input": turns, "truncation": "auto"}),
        ("/v1/messages", lambda turns: {"max_tokens": 1, "messages": turns}),
        ("/v1/messages/count_tokens", lambda turns: {"messages": turns}),
        ("/tokenize", lambda turns: {"messages": turns}),
    ],
)
def test_very_many_messages_do_not_hold_up_the_loop(
    server: LiveServer, path: str, body: Callable[[Any], Any]
) -> None:
    front = psutil.Process(server.process.pid)
    before = sum(front.cpu_times()[:2])
    answer = server.post(path, body([{"role": "user", "content": "x"}] * 400_000))
    assert answer.status_code == 400 and "400000 messages" in answer.json()["error"]["message"], answer.text
    assert sum(front.cpu_times()[:2]) - before < 3  # a template takes 6 s
