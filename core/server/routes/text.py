"""What chat and legacy completions have in common: usage, streams, errors in their midst."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...errors import HeadraceError
from ..api_errors import ApiError, ClientGone, to_api_error
from ..frames import Output, merge
from ..generation import Generation
from ..http import DONE, PING, EventStream, JsonResponse, watched
from ..protocol.common import GenerationFields, PromptTokensDetails, Usage

if TYPE_CHECKING:
    from ..server import Server

logger = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode
_LINE_ENDS = tuple((character.encode(), f"\\u{ord(character):04x}".encode()) for character in "\x85\u2028\u2029")


def event(value: Any) -> bytes:
    """A value as an event of a stream.

    Some clients cut a stream into lines at every character that Unicode calls the end of one; JSON can escape them.
    """
    data = _encode(value)
    for character, escaped in _LINE_ENDS:
        if character in data:
            data = data.replace(character, escaped)
    return b"data: " + data + b"\n\n"


def named_event(value: Any) -> bytes:
    """The same, for protocols that also say the event's type in a line of its own."""
    name: str = value.type
    return b"event: " + name.encode() + b"\n" + event(value)


def _plain_failure(error: ApiError) -> bytes:
    return b"data: " + error.body() + b"\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """How a protocol writes a stream: its chunks, its end, a failure in its midst, and that it is still there."""

    encode: Callable[[Any], bytes] = event
    end: bytes = DONE
    failure: Callable[[ApiError], bytes] = _plain_failure
    ping: bytes = PING


CHUNKS = Wire()
"""OpenAI's chunks, of chat and completions."""


def usage(generation: Generation) -> Usage:
    """Tokens so far."""
    prompt, output = generation.num_prompt_tokens, generation.num_output_tokens
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=output,
        total_tokens=prompt + output,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=generation.num_cached_tokens),
    )


def wants_usage(request: GenerationFields) -> bool:
    """True if the stream ends with a chunk of usage."""
    return bool(request.stream_options and request.stream_options.include_usage)


def usage_of_chunk(request: GenerationFields, generation: Generation) -> Usage | None | msgspec.UnsetType:
    """What a chunk that is not the last says of usage: null if that comes last, the tokens so far if they are wanted
    all along, else nothing."""
    if not wants_usage(request):
        return msgspec.UNSET
    assert request.stream_options is not None
    return usage(generation) if request.stream_options.continuous_usage_stats else None


def check_output(output: Output) -> None:
    """Raise ApiError for a completion that failed in the engine."""
    if output.finish_reason == "error":
        status, code = (400, output.code) if output.code else (500, "engine_error")
        raise ApiError(status, output.error or "the engine failed", code=code)


async def collected(generation: Generation) -> list[Output]:
    """All outputs, whole, by index. Raises ApiError or ClientGone."""
    found: dict[int, Output] = {}
    while changes := await generation.changes():
        for index, output in changes:
            check_output(output)
            if index in found:
                merge(found[index], output)
            else:
                found[index] = output
    return [found[index] for index in sorted(found)]


async def answer_once(server: "Server", request: Request, generation: Generation, make: Any) -> Response:
    """One response, of `make(outputs)`; the request is dropped if the client leaves."""
    try:
        async with watched(request, lambda: server.engine.cancel(generation, ClientGone())):
            outputs = await collected(generation)
    except ApiError as error:
        server.engine.cancel(generation, error)  # the other completions, if one of them failed
        raise
    return JsonResponse(make(outputs), headers=_names(generation))


def _names(generation: Generation) -> dict[str, str]:
    """The request's id, by the names that clients of both protocols look for."""
    return {"x-request-id": generation.id, "request-id": generation.id}


async def answer_stream(
    server: "Server", request: Request, generation: Generation, chunks: AsyncIterator[Any], wire: Wire = CHUNKS
) -> Response:
    """A stream of chunks. Raises ApiError for a request that the engine refuses, before the first header; one that
    waits long gets the headers before that."""
    config = server.config.server

    def gone() -> None:
        server.engine.cancel(generation, ClientGone())

    try:
        async with watched(request, gone), asyncio.timeout(config.ping_interval_s):
            await generation.wait_accepted()
    except TimeoutError:
        logger.debug("no answer of the engine yet request_id=%s", generation.id)
    except ApiError as error:
        server.engine.cancel(generation, error)
        raise
    return EventStream(
        _events(server, generation, chunks, wire),
        on_gone=gone,
        ping=wire.ping,
        ping_interval_s=config.ping_interval_s,
        send_timeout_s=config.send_timeout_s,
        headers=_names(generation),
    )


def as_api_error(error: Exception, request_id: str) -> ApiError:
    """What the client is told of an error in the midst of an answer; one that nobody foresaw is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HeadraceError):
        return to_api_error(error)
    logger.error("a stream failed", exc_info=error, extra={"fields": {"request_id": request_id}})
    return ApiError(500, "internal error; the log says more", code="internal_error")


async def _events(
    server: "Server", generation: Generation, chunks: AsyncIterator[Any], wire: Wire
) -> AsyncIterator[bytes]:
    try:
        async for chunk in chunks:
            yield wire.encode(chunk)
        if wire.end:
            yield wire.end
    except ClientGone:
        return
    except Exception as error:  # noqa: BLE001 - told to the client, and logged if it is unknown
        failure = as_api_error(error, generation.id)
        server.engine.cancel(generation, failure)
        yield wire.failure(failure)
