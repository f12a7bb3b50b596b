"""/v1/chat/completions."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...errors import RequestError
from ..chat_parser import ChatForm, ChatParser, chat_form, whole_message, with_parsed_arguments
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
    ChatRequest,
    ChatResponse,
)
from ..protocol.common import new_id, now, refuse, sampling_params
from ..protocol.completions import FinishReason
from ..request_log import timings
from ..structure import structured_output
from .text import answer_once, answer_stream, check_output, usage, wants_usage

if TYPE_CHECKING:
    from ..server import Server

_UNSUPPORTED = {
    "audio": "this server makes no audio",
    "chat_template": "templates come with the model or --chat-template, not with a request",
    "functions": "the old form of tools; send tools",
    "function_call": "the old form of tool_choice; send tool_choice",
    "echo": "a chat's prompt is not given back",
}


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, at once or as a stream."""
    server: Server = request.app.state.server
    body = await read_json(request, ChatRequest, server.config.server.max_body_bytes)
    server.check_model(body.model)
    refuse(body, _UNSUPPORTED)
    form = chat_form(body, server.format, server.prompts.tokenizer)
    prompt = await server.prompts.render(with_parsed_arguments(body.messages), **_template_options(body))
    token_ids = await server.prompts.encode(prompt, add_special_tokens=bool(body.add_special_tokens))
    params = sampling_params(body, server.defaults, **_params(body, form, prompt))
    answer = _Answer(server, body, form, prompt)
    generation = await server.submit(
        request, answer.id, [token_ids], params, priority=body.priority or 0, cache_salt=body.cache_salt or ""
    )
    if body.stream:
        return await answer_stream(server, request, generation, answer.chunks(generation))
    return await answer_once(server, request, generation, lambda outputs: answer.whole(generation, outputs))


def _template_options(body: ChatRequest) -> dict[str, Any]:
    options = dict(body.chat_template_kwargs or {})
    for name in ("messages", "tools", "documents"):
        options.pop(name, None)
    options["continue_final_message"] = bool(body.continue_final_message)
    options["add_generation_prompt"] = body.add_generation_prompt
    if body.tools and body.tool_choice != "none":
        options["tools"] = body.tools
    if body.documents:
        options["documents"] = body.documents
    if body.reasoning_effort is not None:
        options["reasoning_effort"] = body.reasoning_effort
    return options


def _params(body: ChatRequest, form: ChatForm, prompt: str) -> dict[str, Any]:
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", code="invalid_sampling_params")
    fixed: dict[str, Any] = {
        "max_tokens": body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        "structured_output": form.structured_output(structured_output(body), prompt),
    }
    if form.needs_special_tokens:
        fixed["skip_special_tokens"] = False
    if body.logprobs:
        fixed["logprobs"] = body.top_logprobs or 0
    return fixed


class _Answer:
    """Makes the answers of one request, whole or in chunks."""

    def __init__(self, server: "Server", body: ChatRequest, form: ChatForm, prompt: str) -> None:
        self.id = new_id("chatcmpl")
        self._created = now()
        self._model = body.model or server.model_name
        self._body = body
        self._parsers: list[ChatParser] = [form.new_parser(prompt) for _ in range(body.n or 1)]

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
            timings=timings(generation),
        )

    async def chunks(self, generation: Generation) -> AsyncIterator[ChatChunk]:
        """The events of a stream."""
        for index in range(len(self._parsers)):
            yield self._chunk(ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content="")))
        while changes := await generation.changes():
            for index, output in changes:
                check_output(output)
                parser = self._parsers[index]
                deltas = parser.push(output.text)
                if output.finish_reason is not None:
                    deltas += parser.finish()
                logprobs = self._logprobs(output)
                if not deltas and (logprobs is not None or self._body.return_token_ids):
                    deltas.append(ChatDelta(content=""))
                for number, delta in enumerate(deltas):
                    choice = ChatChunkChoice(index=index, delta=delta)
                    if number == 0:  # a token may add to several parts, but is said once
                        choice.logprobs = logprobs
                        if self._body.return_token_ids:
                            choice.token_ids = output.token_ids
                    yield self._chunk(choice)
                if output.finish_reason is not None:
                    yield self._chunk(
                        ChatChunkChoice(
                            index=index,
                            delta=ChatDelta(),
                            finish_reason=_finish_reason(parser, output),
                            stop_reason=output.stop_reason,
                        )
                    )
        if wants_usage(self._body):
            last = self._chunk()
            last.usage, last.timings = usage(generation), timings(generation)
            yield last

    def _choice(self, index: int, output: Output) -> ChatChoice:
        parser = self._parsers[index]
        deltas = parser.push(output.text) + parser.finish()
        return ChatChoice(
            index=index,
            message=whole_message(deltas),
            logprobs=self._logprobs(output),
            finish_reason=_finish_reason(parser, output),
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self._body.return_token_ids else None,
        )

    def _logprobs(self, output: Output) -> ChatLogprobs | None:
        if output.logprobs is None or not self._body.logprobs:
            return None
        return ChatLogprobs(content=chat_logprobs(output.logprobs, self._body.top_logprobs or 0))

    def _chunk(self, *choices: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(
            id=self.id,
            created=self._created,
            model=self._model,
            choices=list(choices),
            usage=None if wants_usage(self._body) else msgspec.UNSET,
        )


def _finish_reason(parser: ChatParser, output: Output) -> FinishReason | None:
    """An answer that ends with calls ends for them; one that was cut off was cut off."""
    return "tool_calls" if parser.num_calls and output.finish_reason == "stop" else output.finish_reason
