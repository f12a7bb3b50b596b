"""Bodies that come too slowly, and requests whose headers do not end."""

import asyncio
import gc
import gzip
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
import uvicorn.server
from starlette.requests import Request

from headrace.core.server import connection, http
from headrace.core.server.api_errors import ApiError
from headrace.core.server.prompts import Prompts
from headrace.core.server.protocol.completions import CompletionRequest
from headrace.core.server.unknown_fields import UnknownFields
from live_server import LiveServer


def read(parts: list[bytes], pause_s: float) -> bytes:
    """What read_body makes of a body that comes in parts."""

    async def run() -> bytes:
        left = list(parts)

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(pause_s)
            return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

        return await http.read_body(Request({"type": "http", "headers": []}, receive), 10**6)

    return asyncio.run(run())


def test_a_slow_body_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_BODY_S", 0.3)
    monkeypatch.setattr(http, "_LEAST_BYTES_PER_S", 20)
    assert read([b"a", b"b"], 0.01) == b"ab"
    with pytest.raises(ApiError, match="only [4-7] bytes") as error:
        read([b"a"] * 50, 0.1)  # half as fast as it must be
    assert (error.value.status, error.value.code) == (408, "body_timeout")
    assert error.value.headers["Connection"] == "close"
    assert read([b"aaaa"] * 8, 0.1) == b"aaaa" * 8


def decode(body: bytes) -> CompletionRequest:
    """What read_json makes of a body."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    server = SimpleNamespace(unknown_fields=UnknownFields(), prompts=Prompts(None, "", ""))
    app = SimpleNamespace(state=SimpleNamespace(server=server))
    request = Request({"type": "http", "headers": [], "path": "/", "app": app}, receive)
    return asyncio.run(http.read_json(request, CompletionRequest, 2**25))


def test_a_byte_order_mark_is_passed_over() -> None:
    assert decode(b'\xef\xbb\xbf{"prompt": "\xef\xbb\xbfx"}').prompt == "\ufeffx"


@pytest.mark.parametrize("unit", [b"[]", b"{}"])
def test_bodies_of_very_many_lists_are_refused_before_they_are_read(unit: bytes) -> None:
    body = b'{"prompt": "x", "unknown": [%s]}' % b",".join([unit] * 1_000_000)
    before_s = time.process_time()
    with pytest.raises(ApiError, match=r"1000002 lists and objects .* of which 1000000") as error:
        decode(body)
    assert (error.value.status, error.value.code) == (413, "body_too_large")
    assert time.process_time() - before_s < 0.5


def test_no_garbage_is_collected_while_a_body_is_read() -> None:
    rounds: list[Any] = []
    gc.callbacks.append(lambda phase, info: rounds.append(phase))
    try:
        with pytest.raises(ApiError, match="not valid JSON"):
            decode(b"{")
        assert gc.isenabled()
        gc.collect()
        rounds.clear()
        assert decode(b'{"prompt": [%s]}' % b",".join([b"[7]"] * 300_000)).prompt == [[7]] * 300_000
        assert gc.isenabled() and len(rounds) < 500  # of two phases; there would be more than 300 collections
    finally:
        gc.callbacks.pop()


def ask(server: LiveServer, *parts: bytes, timeout_s: float = 30) -> bytes:
    """What the server says to these bytes until it closes the connection."""
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port or 0), timeout=timeout_s) as sock:
        answer = b""
        try:
            for part in parts:
                sock.sendall(part)
            while data := sock.recv(1 << 16):
                answer += data
        except ConnectionError:  # it was closed while this was being sent
            pass
        return answer


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
BODY = json.dumps({"prompt": "x", "max_tokens": 1}).encode()


@pytest.mark.parametrize(
    "parts",
    [
        [HEAD + b"x-long: "] + [b"a" * 10**5] * 20,  # one without an end
        [HEAD] + [b"x-%d: a\r\n" % i * 5000 for i in range(40)],  # very many
        [b"GET /"] + [b"a" * 10**5] * 20,
        [HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nx-trailer: "] + [b"a" * 10**5] * 20,
        [HEAD + b"transfer-encoding: chunked\r\n\r\n1;"] + [b"a" * 10**5] * 20,
    ],
)
def test_headers_without_an_end_are_refused(server: LiveServer, parts: list[bytes]) -> None:
    answer = ask(server, *parts)
    assert answer.startswith(b"HTTP/1.1 431") and b'"code":"headers_too_large"' in answer
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_compressed_bodies_are_told(server: LiveServer) -> None:
    for path, kind in (("/v1/completions", "error"), ("/v1/messages", "error"), ("/v1/responses", "error")):
        response = httpx.post(server.url + path, content=gzip.compress(BODY), headers={"content-encoding": "gzip"})
        assert response.status_code == 415 and "gzip" in response.json()[kind]["message"]
        assert response.json()[kind]["type"] == "invalid_request_error"
    plain = httpx.post(f"{server.url}/v1/completions", content=BODY, headers={"content-encoding": "identity"})
    assert plain.status_code == 200


def test_tiny_chunks_are_fine(server: LiveServer) -> None:
    body = b" " * 100_000 + BODY
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    answer = ask(server, HEAD + b"transfer-encoding: chunked\r\n\r\n", chunks, b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"\x16\x03\x01\x02\x00\x01", "TLS, and this port speaks plain http://"),
        (b"GET /livez HTTP/1.1\r\nContent-Length: x\r\n\r\n", "Invalid character in Content-Length"),
        (b"GET /livez HTTP/1.1\r\nA b: c\r\n\r\n", "Invalid header token"),
    ],
)
def test_what_is_no_http_is_told(server: LiveServer, sent: bytes, reason: str) -> None:
    assert f"the request is no valid HTTP: {reason}".encode() in ask(server, sent)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "'/chat/completions'; did you mean /v1/chat/completions?"),
        ("/v1/v1/models", "'/v1/v1/models'; did you mean /v1/models?"),
        ("/completion", "'/completion'; did you mean /v1/completions?"),
        ("/favicon.ico", "'/favicon.ico'"),
    ],
)
def test_a_wrong_path_is_told_which_was_meant(server: LiveServer, path: str, meant: str) -> None:
    answer = server.post(path, {})
    assert answer.status_code == 404 and answer.json()["error"]["message"] == f"no route {meant}"


@pytest.mark.parametrize("pieces", [1, 7])
def test_a_wish_for_http2_is_passed_over(server: LiveServer, pieces: int) -> None:
    """Java's client asks for h2c in every first request of a connection, with a body."""
    wish = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + wish + b"content-length: %d\r\n\r\n" % len(BODY)
    get = b"GET /version HTTP/1.1\r\nhost: x\r\n" + wish + b"\r\n"
    chunked = HEAD + wish.replace(b"Upgrade,", b"Upgrade, close,") + b"transfer-encoding: chunked\r\n\r\n"
    data = head + BODY + get + head + BODY + chunked + b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    step = -(-len(data) // pieces)
    answer = ask(server, *[data[i : i + step] for i in range(0, len(data), step)])
    assert answer.count(b"HTTP/1.1 200 OK") == 4 and answer.count(b"text_completion") == 3, answer


CHUNKED = HEAD + b"transfer-encoding: chunked\r\n"
KEPT = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
LARGE = b"a" * 5_000_000
LENGTH = b"content-length: %d\r\n\r\n" % len(LARGE)


@pytest.fixture(scope="module")
def small_server(model_folder: Path) -> Iterator[LiveServer]:
    """A server that takes bodies of 100,000 bytes, from those who have a key."""
    with LiveServer(
        model_folder, "--kv-memory", "16MiB", "--api-key", "k", env={"HEADRACE_MAX_BODY_BYTES": "100000"}
    ) as running:
        yield running


@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [
        (HEAD + LENGTH + LARGE, 401, "invalid_api_key"),
        (CHUNKED + b"\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(LARGE), LARGE), 401, "invalid_api_key"),
        (HEAD + b"x-api-key: k\r\n" + LENGTH + LARGE, 413, "body_too_large"),
        (CHUNKED + b"x-api-key: k\r\n\r\n1d4c0\r\n%s\r\n0\r\n\r\n" % LARGE[:120_000], 413, "body_too_large"),
        (HEAD + b"x-api-key: k\r\ncontent-encoding: br\r\n" + LENGTH + LARGE, 415, "unsupported_encoding"),
        (HEAD.replace(b"/v1/completions", b"/nope") + b"x-api-key: k\r\n" + LENGTH + LARGE, 404, "not_found"),
        (HEAD.replace(b"/v1/completions", b"/version") + LENGTH + LARGE, 405, "method_not_allowed"),
        (b"\x16\x03\x01" + LARGE, 400, "invalid_http"),  # TLS where there is none
    ],
)
def test_refusals_of_large_bodies_are_read(
    small_server: LiveServer, request_bytes: bytes, status: int, code: str
) -> None:
    """Nothing is lost to a reset, and nothing waits for a body that is all there."""
    for _ in range(3):
        answer = ask(small_server, request_bytes, timeout_s=10)
        assert answer.startswith(b"HTTP/1.1 %d " % status) and b'"code":"%s"' % code.encode() in answer, answer


@pytest.mark.parametrize(
    ("path", "more", "status"),
    [("/v1/completions", b"x-api-key: k\r\n", 413), ("/v1/completions", b"", 401), ("/version", b"", 405)],
)
def test_nobody_waits_for_a_body_that_was_not_asked_for(
    small_server: LiveServer, path: str, more: bytes, status: int
) -> None:
    head = KEPT.replace(b"/v1/completions", path.encode()) + more + b"expect: 100-continue\r\n"
    answer = ask(small_server, head + LENGTH, timeout_s=10)
    assert answer.startswith(b"HTTP/1.1 %d " % status) and answer.count(b"HTTP/1.1") == 1
    assert b"connection: close" in answer


def test_a_body_that_was_asked_for(small_server: LiveServer) -> None:
    head = HEAD + b"x-api-key: k\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY)
    answer = ask(small_server, head, BODY)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")


STREAM = json.dumps({"prompt": "x", "stream": True, "max_tokens": 50, "ignore_eos": True}).encode()
STREAMED = KEPT + b"content-length: %d\r\n\r\n" % len(STREAM) + STREAM


@pytest.mark.parametrize(
    "broken", [b"junk junk junk\r\n\r\n", KEPT + b"transfer-encoding: chunked\r\n\r\nzz\r\n", KEPT + b"x: " + LARGE]
)
def test_what_came_before_is_answered_first(server: LiveServer, broken: bytes) -> None:
    """Requests that stand in one packet, the last of them broken."""
    for count in (1, 2, 5):
        answer = ask(server, STREAMED * count + broken, timeout_s=10)
        assert answer.count(b"data: [DONE]") == count
        *_, last = answer.split(b"HTTP/1.1 ")
        assert last[:3] in (b"400", b"431") and b"invalid_" in last or b"headers_too" in last


@pytest.mark.parametrize("broken", [b"zz\r\n", b"-1\r\n", b"fffffffffffffffff\r\n", b"1\r\nab\r\n"])
def test_broken_chunks(server: LiveServer, broken: bytes) -> None:
    head = KEPT + b"transfer-encoding: chunked\r\n\r\n"
    for parts in ([head + broken], [head, b"1\r\n{\r\n", broken]):
        answer = ask(server, *parts, timeout_s=10)
        assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1 and b"invalid_http" in answer
    trailers = b"\r\n%x\r\n%s\r\n0\r\nx-checksum: 1\r\n\r\n" % (len(BODY), BODY)
    assert ask(server, CHUNKED + b"trailer: x-checksum\r\n" + trailers).startswith(b"HTTP/1.1 200")


def test_clients_that_know_no_chunks(server: LiveServer) -> None:
    """Of HTTP/1.0: a stream ends with the connection."""
    answer = ask(server, STREAMED.replace(b"HTTP/1.1", b"HTTP/1.0"), timeout_s=10)
    head, _, text = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"connection: close" in head
    *events, end, nothing = text.split(b"\n\n")
    assert (end, nothing) == (b"data: [DONE]", b"")
    parts = [json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] for event in events]
    whole = server.post("/v1/completions", {"prompt": "x", "max_tokens": 50, "ignore_eos": True}).json()
    assert "".join(parts) == whole["choices"][0]["text"]


@pytest.mark.parametrize(
    ("sent", "status"), [(b"", None), (b"POST /v1/comp", 408), (HEAD + b"x-a: b", 408), (STREAMED + KEPT, 408)]
)
def test_heads_that_do_not_end(monkeypatch: pytest.MonkeyPatch, sent: bytes, status: int | None) -> None:
    """In this process, where the time for it can be made short."""
    monkeypatch.setattr(connection, "_HEADER_TIMEOUT_S", 0.3)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.5)  # longer than headers may take
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def run() -> bytes:
        config = uvicorn.Config(app, http=connection.Connection, lifespan="off", log_config=None)
        config.load()
        state = uvicorn.server.ServerState()
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(
            lambda: connection.Connection(config=config, server_state=state, app_state={}), "127.0.0.1"
        )
        async with listener:
            reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
            writer.write(sent)
            answer = await asyncio.wait_for(reader.read(), 10)
            writer.close()
            await writer.wait_closed()
            return answer

    answer = asyncio.run(run())
    if status is None:
        assert answer == b""
        return
    *before, last = answer.split(b"HTTP/1.1 ")[1:]
    assert last.startswith(b"%d " % status) and b'"code":"headers_timeout"' in last
    assert [each[:3] for each in before] == [b"200"] * sent.count(STREAMED)
