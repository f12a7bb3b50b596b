"""Reading requests and writing responses: JSON with a limit, streams of events, clients that leave or do not read."""

import asyncio
import codecs
import contextlib
import gc
import re
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from .api_errors import ApiError, ClientGone

if TYPE_CHECKING:
    from .server import Server

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
ABORT = "headrace.abort"
"""The extension of the ASGI scope under which the connection's abort() can be called."""
PING = b": ping\n\n"
_MAX_CONTAINERS = 1_000_000
_BODY_S = 60.0
_LEAST_BYTES_PER_S = 8192
"""A body has a minute, and longer for what has come of it at this speed."""
_DRAIN_BYTES = 512 * 1024**2
_DRAIN_S = 20.0
"""Of a body that is refused so much is read and thrown away, so that the client gets to read the answer."""
_DECODERS: dict[Any, msgspec.json.Decoder[Any]] = {}
_PATH = re.compile(r" - at `\$\.?(.*?)`$")


async def read_json(request: Request, kind: type[T], max_bytes: int) -> T:
    """The body as a value of a msgspec type; `request.state.ignored` has the names of unknown fields. Raises
    ApiError 400, 408, 413 or 415, or ClientGone."""
    body = (await read_body(request, max_bytes)).removeprefix(codecs.BOM_UTF8)
    _check_containers(body)
    if kind not in _DECODERS:
        _DECODERS[kind] = msgspec.json.Decoder(kind)
    collects = gc.isenabled()
    gc.disable()  # new lists and objects would be gone through again and again, which takes longer than to read them
    try:
        value: T = _DECODERS[kind].decode(body)
        note_unknown(request, body, value)
    except msgspec.ValidationError as error:
        raise invalid_fields(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    finally:
        if collects:
            gc.enable()
    return value


def note_unknown(request: Request, body: bytes, value: Any) -> None:
    """Let `request.state.ignored` name the fields of a JSON object that what it was read as has not. Raises ApiError
    for those that may not be passed over."""
    server: Server = request.app.state.server
    fields = value.__struct_fields__
    request.state.ignored = server.unknown_fields.check(body, fields, request.url.path, server.prompts.is_read, value)


def _check_containers(body: bytes) -> None:
    """Raise ApiError for a body that would hold up the loop: reading JSON keeps the interpreter's lock, so that a
    thread would not help, and each list or object takes as long as hundreds of bytes of text."""
    if len(body) > _MAX_CONTAINERS and (count := body.count(b"[") + body.count(b"{")) > _MAX_CONTAINERS:
        reason = f"the body has {count} lists and objects ([ and {{), of which {_MAX_CONTAINERS} may be"
        raise ApiError(413, reason, code="body_too_large")


def invalid_fields(error: msgspec.ValidationError) -> ApiError:
    """The error for a request whose fields are not of their types, with the name of the field."""
    text = str(error)
    found = _PATH.search(text)
    param = re.split(r"[.\[]", found[1])[0] if found and found[1] else None
    if param is None and (missing := re.search(r"required field `(\w+)`", text)):
        param = missing[1]
    return ApiError(400, text, code="invalid_request", param=param)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises ApiError 413 for a larger one, 408 for one that comes too slowly, 415 for one that is
    compressed, or ClientGone."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        reason = f"content-encoding {encoding!r:.100}: send the body as it is, uncompressed"
        raise ApiError(415, reason, code="unsupported_encoding")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_large(int(length), max_bytes)
    chunks: list[bytes] = []
    size = 0
    started_s = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(started_s + _BODY_S) as deadline:
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk = message.get("body", b"")
                size += len(chunk)
                if size > max_bytes:
                    raise _too_large(size, max_bytes)
                chunks.append(chunk)
                if not message.get("more_body", False):
                    return b"".join(chunks)
                deadline.reschedule(started_s + _BODY_S + size / _LEAST_BYTES_PER_S)
    except TimeoutError:
        reason = f"only {size} bytes of the body came in {asyncio.get_running_loop().time() - started_s:.0f} s"
        raise ApiError(408, reason, code="body_timeout", headers={"Connection": "close"}) from None


def _too_large(size: int, max_bytes: int) -> ApiError:
    message = f"the body has {size} bytes or more, the limit is {max_bytes} (max_body_bytes)"
    return ApiError(413, message, code="body_too_large")


class JsonResponse(Response):
    """A msgspec value as JSON."""

    media_type = "application/json"

    def __init__(self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(msgspec.json.encode(content), status, headers)


class Body:
    """A request's `receive` that knows whether more of the body is to come."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        headers = Headers(scope=scope)
        self.is_awaited = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        self.is_asked_for = headers.get("expect", "").lower() != "100-continue"
        self._receive = receive

    async def __call__(self) -> Message:
        """The next part."""
        self.is_asked_for = True
        message = await self._receive()
        self.is_awaited = self.is_awaited and message.get("more_body", False)
        return message


class ErrorResponse(Response):
    """The error envelope, in the protocol of the path. The rest of a body that nobody has read is read, so that the
    client sees the answer."""

    media_type = "application/json"

    def __init__(self, error: ApiError, path: str) -> None:
        super().__init__(error.body(path), error.status, error.headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        if not isinstance(receive, Body) or not receive.is_awaited:
            await super().__call__(scope, receive, send)
            return
        if not receive.is_asked_for:  # its client waits for a word before it sends it, and will not now
            self.headers["connection"] = "close"
            await super().__call__(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": bytes(self.body), "more_body": True})
        left = _DRAIN_BYTES
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                while left > 0 and receive.is_awaited:
                    left -= len((await receive()).get("body", b""))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream(Response):
    """Server-sent events. `on_gone` is called when the client closes its connection or stops reading."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        *,
        on_gone: Callable[[], None],
        ping_interval_s: float,
        send_timeout_s: float,
        headers: Mapping[str, str],
        ping: bytes = PING,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        self._events = events
        self._on_gone = on_gone
        self._ping_interval_s = ping_interval_s
        self._send_timeout_s = send_timeout_s
        self._ping = ping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until they end or nobody reads them."""
        watcher = asyncio.ensure_future(_watch(receive, self._on_gone))
        pinger = _Pinger(send, self._ping, self._ping_interval_s)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            pinger.arm()
            async for event in self._events:
                pinger.touch()
                async with asyncio.timeout(self._send_timeout_s):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            pinger.stop()
            async with asyncio.timeout(self._send_timeout_s):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            # What was written still stands in the socket's buffer; only a reset gets rid of it.
            self._on_gone()
            scope.get("extensions", {}).get(ABORT, _nothing)()
            await asyncio.sleep(0.01)
        finally:
            pinger.stop()
            watcher.cancel()


class _Pinger:
    """Sends a comment when nothing was sent for a while: one timer a stream, moved on when it fires."""

    def __init__(self, send: Send, ping: bytes, interval_s: float) -> None:
        self._send = send
        self._bytes = ping
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._last_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def arm(self) -> None:
        """Start the clock."""
        self._timer = self._loop.call_later(self._interval_s, self._fire)

    def touch(self) -> None:
        """Something is being sent."""
        self._last_s = self._loop.time()

    def stop(self) -> None:
        """No more comments."""
        for pending in (self._timer, self._task):
            if pending is not None:
                pending.cancel()

    def _fire(self) -> None:
        left_s = self._last_s + self._interval_s - self._loop.time()
        if left_s <= 0.001:
            self._task = self._loop.create_task(self._ping())
            self._last_s, left_s = self._loop.time(), self._interval_s
        self._timer = self._loop.call_later(left_s, self._fire)

    async def _ping(self) -> None:
        await self._send({"type": "http.response.body", "body": self._bytes, "more_body": True})


def _nothing() -> None:
    return


async def _watch(receive: Receive, on_gone: Callable[[], None]) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            on_gone()
            return


class watched:
    """In the block, a client that closes its connection calls `on_gone`; for responses that are not streams."""

    def __init__(self, request: Request, on_gone: Callable[[], None]) -> None:
        self._watcher = asyncio.ensure_future(_watch(request.receive, on_gone))

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, *error: object) -> None:
        self._watcher.cancel()
