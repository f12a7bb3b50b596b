"""One streamed request to a server of OpenAI's API, with the time of every token: what `bench serve` measures by."""

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import Any

import httptools
import msgspec

from .address import parse_address

_MAX_ERROR_CHARS = 200


@dataclass(slots=True, kw_only=True)
class Sample:
    """What one request came to. Times are of time.perf_counter, in seconds."""

    started_s: float
    token_s: list[float] = field(default_factory=list)
    """when each event with text came"""
    ended_s: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    """as the server counts them; it may put several into one event"""
    error: str = ""
    """why it failed; "" if it did not"""

    @property
    def ttft_s(self) -> float:
        """Until the first token."""
        return self.token_s[0] - self.started_s

    @property
    def e2e_s(self) -> float:
        """Until the last token."""
        return self.token_s[-1] - self.started_s

    @property
    def itl_s(self) -> list[float]:
        """Between events."""
        return [later - earlier for earlier, later in zip(self.token_s, self.token_s[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """Per token after the first; None if there is none."""
        count = self.num_output_tokens - 1
        return (self.token_s[-1] - self.token_s[0]) / count if count > 0 else None


class Target:
    """A server's address, with or without /v1."""

    def __init__(self, url: str, *, api_key: str = "") -> None:
        """Raises ConfigError for what is no address."""
        address = parse_address(url)
        self.host = address.host
        self.port = address.port or (443 if address.scheme == "https" else 80)
        self.root = address.root
        self.url = f"{address.scheme}://{address.netloc}{self.root}"
        self.ssl = ssl.create_default_context() if address.scheme == "https" else None
        self._key = f"authorization: Bearer {api_key}\r\n" if api_key else ""

    async def post(self, path: str, body: dict[str, Any], timeout_s: float) -> Sample:
        """Send a request with `stream` set and read its stream to the end. Never raises: errors are in the sample."""
        data = msgspec.json.encode(body)
        head = (
            f"POST {self.root}{path} HTTP/1.1\r\nhost: {self.host}:{self.port}\r\n{self._key}"
            f"content-type: application/json\r\naccept: text/event-stream\r\nconnection: close\r\n"
            f"content-length: {len(data)}\r\n\r\n"
        )
        stream = _Stream(Sample(started_s=time.perf_counter()))
        transport: asyncio.Transport | None = None
        try:
            async with asyncio.timeout(timeout_s):
                loop = asyncio.get_running_loop()
                transport, _ = await loop.create_connection(lambda: stream, self.host, self.port, ssl=self.ssl)
                transport.write(head.encode() + data)
                await stream.ended
        except TimeoutError:
            stream.fail(f"no end within {timeout_s:g} s")
        except OSError as error:
            stream.fail(f"no connection: {error}")
        finally:
            if transport is not None:
                transport.abort()
        stream.sample.ended_s = time.perf_counter()
        return stream.sample


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def has_news(self) -> bool:
        """True for an event that a token made. Of completions also one without text, if it is not the end."""
        if self.delta is None:
            return bool(self.text) or self.finish_reason is None
        delta = self.delta
        return bool(delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class _Stream(asyncio.Protocol):
    """Reads one response. Invariant: `ended` is done once, when no more can come."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.ended = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._buffer = b""
        self._is_whole = False

    def fail(self, error: str) -> None:
        """The request failed; the first reason stays."""
        self.sample.error = self.sample.error or error
        self._end()

    # ---- asyncio.Protocol -------------------------------------------------------------------------------------
    def data_received(self, data: bytes) -> None:
        """Bytes of the response."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(f"not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """No more will come."""
        if not self.ended.done():
            self.fail(f"the connection broke off{f': {exc}' if exc else ''}")

    # ---- httptools --------------------------------------------------------------------------------------------
    def on_body(self, body: bytes) -> None:
        """A part of the body: whole events, or pieces of them."""
        now_s = time.perf_counter()
        if self._parser.get_status_code() != 200:
            self._buffer += body
            return
        *events, self._buffer = (self._buffer + body).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            if event.startswith(b"data:"):
                self._take(event[5:].strip(), now_s)

    def on_message_complete(self) -> None:
        """The end of the response."""
        status = self._parser.get_status_code()
        if status != 200:
            self.fail(f"HTTP {status}: {_message(self._buffer)}")
        elif not self._is_whole:
            self.fail("the stream ended without [DONE]")
        elif not self.sample.token_s:
            self.fail("no token came")
        self._end()

    def _take(self, data: bytes, now_s: float) -> None:
        if data == b"[DONE]":
            self._is_whole = True
            return
        try:
            event = _decode(data)
        except msgspec.MsgspecError as error:
            self.fail(f"an event that is no chunk: {error}")
            return
        if event.error is not None:
            self.fail(f"in the stream: {_message(data)}")
        if any(choice.has_news() for choice in event.choices):
            self.sample.token_s.append(now_s)
        if event.usage is not None:
            self.sample.num_prompt_tokens = event.usage.prompt_tokens
            self.sample.num_output_tokens = event.usage.completion_tokens

    def _end(self) -> None:
        if not self.sample.num_output_tokens:
            self.sample.num_output_tokens = len(self.sample.token_s)
        if not self.ended.done():
            self.ended.set_result(None)


def _message(data: bytes) -> str:
    try:
        error = msgspec.json.decode(data)
        error = error.get("error", error)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:_MAX_ERROR_CHARS]
    except (msgspec.DecodeError, AttributeError):
        return data.decode("utf-8", "replace")[:_MAX_ERROR_CHARS]
