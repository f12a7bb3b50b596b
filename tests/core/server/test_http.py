"""Bodies that come too slowly, and requests whose headers do not end."""

import asyncio
import gc
import gzip
import json
import socket
import time
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from headrace.core.server import http
from headrace.core.server.api_errors import ApiError
from headrace.core.server.protocol.completions import CompletionRequest
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

    request = Request({"type": "http", "headers": []}, receive)
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


def ask(server: LiveServer, *parts: bytes) -> bytes:
    """What the server says to these bytes until it closes the connection."""
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port or 0), timeout=30) as sock:
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
    assert answer == b"" or (answer.startswith(b"HTTP/1.1 431") and b'"code":"headers_too_large"' in answer)
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
