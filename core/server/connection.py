"""One client's connection: uvicorn's HTTP/1 with limits, errors in the envelope, and no change of protocol."""

import asyncio
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from .api_errors import ApiError
from .http import ABORT

_HEADER_TIMEOUT_S = 60.0
"""A connection that has not sent a request's headers after this long is closed."""
_MAX_HEAD_BYTES = 256 * 1024
"""Of a request's headers, and of whatever else comes with its body."""
_HEAD_PER_BODY = 9
"""So many bytes that are no body may come with each that is: a chunk of one byte takes five."""
_LINGER_S = 2.0
"""How long a connection that is refused stays open for its client to read why: closing it while data comes in would
throw away what was written."""
_UPGRADE_HEADERS = (b"upgrade", b"http2-settings")


class Connection(HttpToolsProtocol):
    """HTTP/1 of uvicorn with limits on headers, how long they may take and how large they may be, errors in the
    envelope, and requests to speak another protocol passed over."""

    def connection_made(self, transport: Any) -> None:
        """Start the clock for the first request's headers."""
        super().connection_made(transport)
        self.app = _plain_for_http_1_0(self.app)
        self._num_head_bytes = 0
        self._plain_head = b""
        self._refusal: bytes | None = None
        self._is_in_head = False
        self._cycle_before = self.cycle
        self._timer = self.loop.call_later(_HEADER_TIMEOUT_S, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop it."""
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, and count what is no body: headers, trailers, lengths of chunks; the parser keeps them all."""
        if self._refusal is not None:
            return  # read and thrown away, so that the client gets to read why
        self._num_head_bytes += len(data)
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
                break
            except httptools.HttpParserError as error:
                is_tls = data.startswith(b"\x16\x03")
                what = "TLS, and this port speaks plain http://" if is_tls else str(error)
                self.send_400_response(f"the request is no valid HTTP: {what}")
                return
            except httptools.HttpParserUpgrade as upgrade:
                # The parser leaves the rest to another protocol; a new one takes the same request without that wish.
                head, self._plain_head = self._plain_head, b""
                data = head + data[upgrade.args[0] :] if head else b""
                self.parser = httptools.HttpRequestParser(self)
        if self._num_head_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, f"headers of more than {_MAX_HEAD_BYTES} bytes", "headers_too_large")

    def on_body(self, body: bytes) -> None:
        """Take a part of the body, and forgive the lengths of its chunks, unless these are tiny."""
        self._num_head_bytes -= _HEAD_PER_BODY * len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The next request's headers count anew."""
        if self._plain_head:
            return
        self._num_head_bytes = 0
        super().on_message_complete()

    def on_message_begin(self) -> None:
        """Let the application reset the connection; start the clock for later requests."""
        super().on_message_begin()
        scope = cast(dict[str, Any], self.scope)
        scope["extensions"] = {ABORT: self.transport.abort}
        self._is_in_head = True
        self._timer.cancel()
        self._timer = self.loop.call_later(_HEADER_TIMEOUT_S, self._give_up)

    def on_headers_complete(self) -> None:
        """The headers are there. Those that ask for another protocol (h2c, as Java's client does) are taken again
        without."""
        if self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers):
            self._plain_head = self._head_without_upgrade()
            return
        self._is_in_head = False
        self._timer.cancel()
        self._cycle_before = self.cycle
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Go on with what came meanwhile."""
        super().on_response_complete()
        if self._refusal and not self._is_answering():
            self._say_refusal()

    def send_400_response(self, msg: str) -> None:
        """Not HTTP."""
        self._refuse(400, msg, "invalid_http")

    def _head_without_upgrade(self) -> bytes:
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [method + b" " + self.url + b" HTTP/" + version]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(token for token in tokens if token.lower() not in _UPGRADE_HEADERS)
            if name not in _UPGRADE_HEADERS:
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])

    def _is_answering(self) -> bool:
        """True while a request that came before is being answered, or waits for its turn."""
        return bool(self.pipeline) or not (self.cycle is None or self.cycle.response_complete)

    def _refuse(self, status: int, reason: str, code: str) -> None:
        """Answer what follows on this connection with an error, once what came before is answered."""
        body = ApiError(status, reason, code=code).body()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self._refusal = STATUS_LINE[status] + head + body
        cycle = self.cycle
        if cycle is not None and cycle.more_body and not cycle.response_complete:  # it is this one's body
            if self.pipeline:
                self.pipeline.popleft()  # its turn does not come
                self.cycle = self._cycle_before
            else:
                if cycle.response_started:
                    self.transport.close()
                else:
                    self._say_refusal()
                return
        if not self._is_answering():
            self._say_refusal()

    def _say_refusal(self) -> None:
        assert self._refusal is not None
        self.transport.write(self._refusal)
        self._refusal = b""
        self._timer.cancel()
        self._timer = self.loop.call_later(_LINGER_S, self.transport.close)

    def _give_up(self) -> None:
        if self.transport.is_closing():
            return
        if self._is_answering():  # reading may have been paused for it
            self._timer = self.loop.call_later(_HEADER_TIMEOUT_S, self._give_up)
        elif self._is_in_head:
            self._refuse(408, f"the headers did not end within {_HEADER_TIMEOUT_S:.0f} s", "headers_timeout")
        else:
            self.transport.close()


def _plain_for_http_1_0(app: Any) -> Any:
    """The application, with streams that end with the connection for clients that know no chunks."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["http_version"] != "1.0":
            await app(scope, receive, send)
            return
        cycle, lock = send.__self__, asyncio.Lock()
        has_length = True

        async def send_plain(message: Any) -> None:
            nonlocal has_length
            async with lock:
                if message["type"] == "http.response.start":
                    has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
                    if not has_length:
                        cycle.chunked_encoding = False
                elif not has_length:
                    cycle.expected_content_length = len(message.get("body", b""))
                await send(message)

        await app(scope, receive, send_plain)

    return answer
