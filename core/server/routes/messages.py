"""Anthropic's /v1/messages and /v1/messages/count_tokens."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from ..api_errors import ApiError
from ..frames import Output
from ..generation import Generation
from ..http import JsonResponse, read_json
from ..messages.blocks import chat_request
from ..messages.builder import MessageBuilder
from ..protocol.common import new_id, refuse
from ..protocol.messages import CountTokensRequest, Message, MessageEvent, MessagesRequest, MessageUsage, TokenCount
from ..request_log import timings
from ..turn import Turn, read_turn, render_turn, submit_turn
from .text import Wire, answer_once, answer_stream, check_output, named_event

if TYPE_CHECKING:
    from ..server import Server

_UNSUPPORTED = {
    "container": "this server runs no code",
    "mcp_servers": "this server calls no other ones; send tools",
}
PING = b'event: ping\ndata: {"type": "ping"}\n\n'


async def create(request: Request) -> Response:
    """Answer a conversation in Anthropic's protocol, at once or as a stream."""
    server: Server = request.app.state.server
    body = await read_json(request, MessagesRequest, server.config.server.max_body_bytes)
    server.check_model(body.model)
    refuse(body, _UNSUPPORTED)
    server.prompts.check_count(len(body.messages))
    turn = await read_turn(server, chat_request(body))
    answer = _Answer(server, turn, body)
    generation = await submit_turn(server, request, answer.id, turn)
    if body.stream:
        wire = Wire(encode=named_event, end=b"", failure=_failure, ping=PING)
        return await answer_stream(server, request, generation, answer.events(generation), wire)
    return await answer_once(server, request, generation, lambda outputs: answer.whole(generation, outputs[0]))


async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of a message would have."""
    server: Server = request.app.state.server
    body = await read_json(request, CountTokensRequest, server.config.server.max_body_bytes)
    server.check_model(body.model)
    refuse(body, _UNSUPPORTED)
    server.prompts.check_count(len(body.messages))
    chat = chat_request(body)
    _, token_ids = await render_turn(server, chat, chat.messages)
    return JsonResponse(TokenCount(input_tokens=len(token_ids)))


class _Answer:
    """Makes one message, whole or as events."""

    def __init__(self, server: "Server", turn: Turn, body: MessagesRequest) -> None:
        self.id = new_id("msg_")
        self._max_tokens = body.max_tokens
        usage = MessageUsage(input_tokens=len(turn.token_ids))
        message = Message(id=self.id, model=body.model or server.model_name, content=[], usage=usage)
        self._builder = MessageBuilder(message, turn.new_parser())

    def whole(self, generation: Generation, output: Output) -> Message:
        """The message that is no stream."""
        self._builder.push(output)
        self._builder.finish(generation, output, self._max_tokens)
        self._builder.message.timings = timings(generation)
        return self._builder.message

    async def events(self, generation: Generation) -> AsyncIterator[MessageEvent]:
        """The events of a stream."""
        for event in self._builder.start():
            yield event
        while changes := await generation.changes():
            for _, output in changes:
                check_output(output)
                for event in self._builder.push(output):
                    yield event
                if output.finish_reason is not None:
                    for event in self._builder.finish(generation, output, self._max_tokens):
                        yield event


def _failure(error: ApiError) -> bytes:
    return b"event: error\ndata: " + error.body("/v1/messages") + b"\n\n"
