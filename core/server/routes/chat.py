"""/v1/chat/completions."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from ...errors import RequestError
from ..chat_parser import TurnParser
from ..formats.parser import Answer, AnswerDelta
from ..frames import Output
from ..generation import Generation
from ..http import read_json
from ..logprobs import chat_logprobs, prompt_logprobs
from ..protocol.chat import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChatResponse,
    FunctionDelta,
    ToolCall,
)
from ..protocol.common import NO_TEMPLATE, new_id, now, refuse
from ..request_log import timings
from ..turn import Turn, finish_reason, read_turn, submit_turn
from .text import answer_once, answer_stream, check_output, usage, usage_of_chunk, wants_usage

if TYPE_CHECKING:
    from ..server import Server

_UNSUPPORTED = {
    "audio": "this server makes no audio",
    "chat_template": NO_TEMPLATE,
    "functions": "the old form of tools; send tools",
    "function_call": "the old form of tool_choice; send tool_choice",
}


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, at once or as a stream."""
    server: Server = request.app.state.server
    body = await read_json(request, ChatRequest, server.config.server.max_body_bytes)
    server.check_model(body.model)
    refuse(body, _UNSUPPORTED)
    if body.web_search_options is not None:
        raise RequestError("web_search_options: this server searches nothing", code="unsupported_parameter")
    if body.modalities and body.modalities != ["text"]:
        raise RequestError("modalities: this server makes text", code="unsupported_parameter")
    turn = await read_turn(server, body)
    answer = _Answer(server, turn)
    generation = await submit_turn(server, request, answer.id, turn)
    if body.stream:
        return await answer_stream(server, request, generation, answer.chunks(generation))
    return await answer_once(server, request, generation, lambda outputs: answer.whole(generation, outputs))


class _Answer:
    """Makes the answers of one request, whole or in chunks."""

    def __init__(self, server: "Server", turn: Turn) -> None:
        self.id = new_id("chatcmpl-")
        self._created = now()
        self._body = turn.request
        self._model = self._body.model or server.model_name
        self._turn = turn
        self._parsers: dict[int, TurnParser] = {}
        self._echoed = _last_of_assistant(self._body.messages) if self._body.echo else ""

    def whole(self, generation: Generation, outputs: list[Output]) -> ChatResponse:
        """The response that is no stream."""
        prompt = outputs[0].prompt_logprobs
        return ChatResponse(
            id=self.id,
            created=self._created,
            model=self._model,
            choices=[self._choice(index, output) for index, output in enumerate(outputs)],
            usage=usage(generation),
            prompt_logprobs=None if prompt is None else prompt_logprobs(prompt),
            prompt_token_ids=self._turn.token_ids if self._body.return_token_ids else None,
            timings=timings(generation),
        )

    async def chunks(self, generation: Generation) -> AsyncIterator[ChatChunk]:
        """The events of a stream."""
        for index in range(len(generation.completions)):
            first = self._chunk(
                generation, ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))
            )
            if index == 0 and self._body.return_token_ids:
                first.prompt_token_ids = self._turn.token_ids
            yield first
            if self._echoed:
                yield self._chunk(generation, ChatChunkChoice(index=index, delta=ChatDelta(content=self._echoed)))
        while changes := await generation.changes():
            for index, output in changes:
                check_output(output)
                for number, choice in enumerate(self._pieces(index, output)):
                    chunk = self._chunk(generation, choice)
                    if index == number == 0 and output.prompt_logprobs is not None:
                        chunk.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
                    yield chunk
        if wants_usage(self._body):
            last = self._chunk(generation)
            last.usage, last.timings = usage(generation), timings(generation)
            yield last

    def _pieces(self, index: int, output: Output) -> Iterator[ChatChunkChoice]:
        """What is new of one answer, and how it ended."""
        body, parser = self._body, self._parser(index)
        parts = self._told(parser.feed(output.text))
        if output.finish_reason is not None:
            parts += self._told(parser.finish())
        deltas = [_delta(part) for part in parts]
        logprobs = self._logprobs(output)
        if not deltas and (logprobs is not None or output.prompt_logprobs is not None or body.return_token_ids):
            deltas.append(ChatDelta(content=""))
        for number, delta in enumerate(deltas):
            choice = ChatChunkChoice(index=index, delta=delta)
            if number == 0:  # a token may add to several parts, but is said once
                choice.logprobs = logprobs
                if body.return_token_ids:
                    choice.token_ids = output.token_ids
            yield choice
        if output.finish_reason is not None:
            yield ChatChunkChoice(
                index=index,
                delta=ChatDelta(),
                finish_reason=finish_reason(parser, output),
                stop_reason=output.stop_reason,
            )

    def _told(self, parts: Sequence[AnswerDelta]) -> list[AnswerDelta]:
        """The parts that the client wants."""
        return [part for part in parts if part.kind != "reasoning" or self._body.include_reasoning is not False]

    def _parser(self, index: int) -> TurnParser:
        """Of one completion, made when it is needed: how many there may be is checked on the way to the engine."""
        if index not in self._parsers:
            self._parsers[index] = self._turn.new_parser()
        return self._parsers[index]

    def _choice(self, index: int, output: Output) -> ChatChoice:
        parser = self._parser(index)
        return ChatChoice(
            index=index,
            message=_message(self._told(parser.feed(output.text) + parser.finish()), self._echoed),
            logprobs=self._logprobs(output),
            finish_reason=finish_reason(parser, output),
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self._body.return_token_ids else None,
        )

    def _logprobs(self, output: Output) -> ChatLogprobs | None:
        if output.logprobs is None or not self._body.logprobs:
            return None
        return ChatLogprobs(
            content=chat_logprobs(
                output.logprobs,
                self._body.top_logprobs or 0,
                by_id=bool(self._body.return_tokens_as_token_ids),
            )
        )

    def _chunk(self, generation: Generation, *choices: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(
            id=self.id,
            created=self._created,
            model=self._model,
            choices=list(choices),
            usage=usage_of_chunk(self._body, generation),
        )


def _message(parts: Sequence[AnswerDelta], echoed: str) -> ChatMessage:
    """The message that the parts make up, behind what is echoed; its calls have no index."""
    answer = Answer(content=echoed, tool_calls=[])
    answer.add(parts)
    message = ChatMessage(content=answer.content if answer.content or not answer.tool_calls else None)
    if answer.reasoning:
        message.reasoning = message.reasoning_content = answer.reasoning
    if answer.tool_calls:
        message.tool_calls = [
            ToolCall(id=call.id, type="function", function=FunctionDelta(name=call.name, arguments=call.arguments))
            for call in answer.tool_calls
        ]
    return message


def _last_of_assistant(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of the last message, "" if it is not the assistant's."""
    last = messages[-1]
    if last.get("role") != "assistant":
        return ""
    content = last.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


def _delta(part: AnswerDelta) -> ChatDelta:
    if part.kind == "content":
        return ChatDelta(content=part.text)
    if part.kind == "reasoning":
        return ChatDelta(reasoning=part.text, reasoning_content=part.text)
    if part.kind == "tool_call":
        function = FunctionDelta(name=part.name, arguments="")
        return ChatDelta(tool_calls=[ToolCall(index=part.index, id=part.id, type="function", function=function)])
    return ChatDelta(tool_calls=[ToolCall(index=part.index, function=FunctionDelta(arguments=part.text))])
