"""/v1/responses: responses over items, kept so that a next one can go on from them."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from ...errors import RequestError
from ..api_errors import ApiError, ClientGone
from ..generation import Generation
from ..http import EventStream, JsonResponse, read_json
from ..protocol.chat import ChatRequest
from ..protocol.common import ResponseFormat, SamplingFields, new_id, now, refuse
from ..protocol.responses import (
    DeletedResponse,
    InputFields,
    InputTokens,
    InputTokensRequest,
    ItemList,
    ReasoningOptions,
    ResponseEvent,
    ResponseObject,
    ResponsesRequest,
    TextOptions,
)
from ..responses.builder import ResponseBuilder
from ..responses.items import read_items, to_messages
from ..responses.store import Run, StoredResponse
from ..turn import Turn, finish_reason, fit_turn, read_turn, render_turn, submit_turn
from .text import Wire, answer_once, answer_stream, as_api_error, check_output, named_event

if TYPE_CHECKING:
    from ..server import Server

_UNSUPPORTED = {
    "prompt": "this server stores no prompts; send input and instructions",
    "conversation": "this server keeps no conversations; send previous_response_id",
}
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (_LOGPROBS, "reasoning.encrypted_content")
_MAX_METADATA = 16


async def create(request: Request) -> Response:
    """Make a response, at once, as a stream, or in the background."""
    server: Server = request.app.state.server
    body = await read_json(request, ResponsesRequest, server.config.server.max_body_bytes)
    server.check_model(body.model)
    _check(body)
    history = _history(server, request.state.user, body)
    chat = _chat_request(body, history)
    if body.truncation == "auto":
        chat.messages = await fit_turn(server, chat)
    turn = await read_turn(server, chat)
    answer = _Answer(server, request.state.user, body, turn, history)
    generation = await submit_turn(server, request, answer.id, turn)
    if body.background:
        return await _in_background(server, generation, answer, is_stream=bool(body.stream))
    if body.stream:
        wire = Wire(encode=named_event, end=b"", failure=answer.broken)
        return await answer_stream(server, request, generation, answer.events(generation), wire)
    return await answer_once(server, request, generation, lambda outputs: answer.whole(generation, outputs[0]))


async def retrieve(request: Request) -> Response:
    """A response that is kept; of one made in the background also its stream (stream=true, starting_after=N)."""
    server: Server = request.app.state.server
    stored = server.responses.get(request.state.user, request.path_params["response_id"])
    query = request.query_params
    if query.get("stream", "").lower() not in ("true", "1"):
        return JsonResponse(stored.response)
    if stored.run is None:
        raise RequestError("only responses made in the background can be streamed again", code="not_streamable")
    starting_after = _number(query, "starting_after", -1, low=-1)
    return _replay(server, stored.run.read(starting_after), stored.response.id)


async def delete(request: Request) -> Response:
    """Forget a response; one that is being made is stopped."""
    server: Server = request.app.state.server
    response_id = request.path_params["response_id"]
    server.responses.delete(request.state.user, response_id)
    return JsonResponse(DeletedResponse(id=response_id))


async def cancel(request: Request) -> Response:
    """Stop a response that is made in the background; one that is done stays as it is."""
    server: Server = request.app.state.server
    stored = server.responses.get(request.state.user, request.path_params["response_id"])
    run = stored.run
    if run is None:
        raise RequestError("only responses made in the background can be cancelled", code="not_cancellable")
    if not run.is_done:
        run.stop()
        async for _ in run.read(len(run.events)):
            pass
    return JsonResponse(stored.response)


async def input_items(request: Request) -> Response:
    """The items that a response was made of, newest first (order=asc: oldest first), 20 at a time (limit, after)."""
    server: Server = request.app.state.server
    stored = server.responses.get(request.state.user, request.path_params["response_id"])
    query = request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError(f"order must be asc or desc, got {order!r:.100}", code="invalid_request")
    items = stored.history if order == "asc" else stored.history[::-1]
    limit, after = _number(query, "limit", 20, low=1, high=100), query.get("after")
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise RequestError(f"after: no item {after!r:.100} in the input", code="item_not_found")
        items = items[places[0] + 1 :]
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else ("", "")
    return JsonResponse(ItemList(data=page, first_id=first, last_id=last, has_more=len(items) > limit))


async def input_tokens(request: Request) -> Response:
    """How many tokens the prompt of a response would have."""
    server: Server = request.app.state.server
    body = await read_json(request, InputTokensRequest, server.config.server.max_body_bytes)
    server.check_model(body.model)
    refuse(body, _UNSUPPORTED)
    chat = _chat_request(body, _history(server, request.state.user, body))
    _, token_ids = await render_turn(server, chat, chat.messages)
    return JsonResponse(InputTokens(input_tokens=len(token_ids)))


# ---- what is asked for ----------------------------------------------------------------------------------------
def _check(body: ResponsesRequest) -> None:
    refuse(body, _UNSUPPORTED)
    if body.n not in (None, 1):
        raise RequestError("n: one request makes one response", code="unsupported_parameter")
    if body.background and body.store is False:
        raise RequestError("background needs store: there is nobody else to give it to", code="invalid_request")
    if body.max_output_tokens is not None and body.max_output_tokens < 0:
        raise RequestError(
            f"max_output_tokens must not be negative, got {body.max_output_tokens}", code="invalid_sampling_params"
        )
    if body.metadata and len(body.metadata) > _MAX_METADATA:
        raise RequestError(
            f"metadata has {len(body.metadata)} keys; {_MAX_METADATA} are allowed", code="invalid_request"
        )
    for name in body.include or ():
        if name not in _INCLUDABLE:
            raise RequestError(f"include: this server has no {name!r:.100}", code="unsupported_parameter")


def _history(server: "Server", user: str, body: InputFields) -> list[dict[str, Any]]:
    """All items that the response goes on from. Raises RequestError or ApiError."""
    items: list[dict[str, Any]] = []
    if isinstance(body.input, list):
        server.prompts.check_count(len(body.input))
    if body.previous_response_id:
        previous = server.responses.get(user, body.previous_response_id, "previous_response_id")
        if previous.response.status in ("in_progress", "queued"):
            raise RequestError(
                f"previous_response_id: {body.previous_response_id} is not done yet", code="response_not_done"
            )
        items += previous.items()
    for item in read_items(body.input):
        items.append(server.responses.find_item(user, item["id"]) if item["type"] == "item_reference" else item)
    if not items and not body.instructions:
        raise RequestError("input: there is nothing to answer", code="invalid_input")
    return items


def _chat_request(body: InputFields, items: list[dict[str, Any]]) -> ChatRequest:
    """The same request in chat's words."""
    chat = ChatRequest(
        model=body.model,
        messages=to_messages(body.instructions, items),
        tools=_tools(body),
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        response_format=_response_format(body.text.format if body.text else None),
        chat_template_kwargs=body.chat_template_kwargs,
    )
    if isinstance(body, ResponsesRequest):
        for name in SamplingFields.__struct_fields__:
            setattr(chat, name, getattr(body, name))
        chat.max_completion_tokens = body.max_output_tokens
        chat.priority, chat.cache_salt = body.priority, body.cache_salt
        if body.top_logprobs or _LOGPROBS in (body.include or ()):
            chat.logprobs, chat.top_logprobs = True, body.top_logprobs
    return chat


def _tools(body: InputFields) -> list[dict[str, Any]] | None:
    """Tools as chat has them."""
    given = body.tools or []
    for index, tool in enumerate(given):
        if tool.get("type") != "function":
            raise RequestError(
                f"tools[{index}] has the type {tool.get('type')!r:.100}; this server has only functions, which the "
                "client calls",
                code="unsupported_parameter",
            )
    fields = ("name", "description", "parameters", "strict")
    tools = [
        {"type": "function", "function": {name: tool[name] for name in fields if tool.get(name) is not None}}
        for tool in given
    ]
    return tools or None


def _response_format(format: dict[str, Any] | None) -> ResponseFormat | None:
    if format is None:
        return None
    kind = format.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise RequestError(
            f"text.format needs the type text, json_object or json_schema, got {kind!r:.100}",
            code="invalid_response_format",
        )
    if kind == "json_schema" and format.get("schema") is None:
        raise RequestError("text.format: json_schema needs a schema", code="invalid_response_format")
    own = {name: value for name, value in format.items() if name != "type"}
    return ResponseFormat(type=kind, json_schema=own if kind == "json_schema" else None)


def _number(query: Mapping[str, str], name: str, default: int, *, low: int, high: int = 2**31) -> int:
    text = query.get(name, str(default))
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise RequestError(f"{name} must be a number from {low} to {high}, got {text!r:.100}", code="invalid_request")
    return value


# ---- what is answered -----------------------------------------------------------------------------------------
class _Answer:
    """Makes one response, whole or as events, and keeps it if that is wanted."""

    def __init__(
        self, server: "Server", user: str, body: ResponsesRequest, turn: Turn, history: list[dict[str, Any]]
    ) -> None:
        self.id = new_id("resp_")
        self._server = server
        self._parser = turn.new_parser()
        tokenizer = server.prompts.tokenizer
        self.builder = ResponseBuilder(
            _response(self.id, server, body, turn),
            self._parser,
            num_top_logprobs=(body.top_logprobs or 0) if turn.request.logprobs else None,
            count_tokens=lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
        )
        self._is_kept = body.store is not False
        self.stored = StoredResponse(user=user, response=self.builder.response, history=history)

    def whole(self, generation: Generation, output: Any) -> ResponseObject:
        """The response that is no stream."""
        self.builder.push(output)
        self._end(generation, output)
        return self.builder.response

    async def events(self, generation: Generation) -> AsyncIterator[ResponseEvent]:
        """The events of a stream."""
        for event in self.builder.start():
            yield event
        while changes := await generation.changes():
            for _, output in changes:
                check_output(output)
                for event in self.builder.push(output):
                    yield event
                if output.finish_reason is not None:
                    for event in self._end(generation, output):
                        yield event

    def failed(self, error: ApiError) -> list[ResponseEvent]:
        """The last events of a response that broke off."""
        events = self.builder.fail(error)
        self.keep()
        return events

    def broken(self, error: ApiError) -> bytes:
        """The same, as bytes."""
        return b"".join(map(named_event, self.failed(error)))

    def keep(self) -> None:
        """Store it, or count it again, if it is to be stored."""
        if self._is_kept:
            self._server.responses.put(self.stored)

    def _end(self, generation: Generation, output: Any) -> list[ResponseEvent]:
        events = self.builder.finish(generation, finish_reason(self._parser, output))
        self.keep()
        return events


def _response(response_id: str, server: "Server", body: ResponsesRequest, turn: Turn) -> ResponseObject:
    text = body.text or TextOptions()
    return ResponseObject(
        id=response_id,
        created_at=now(),
        status="in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=body.model or server.model_name,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=body.reasoning or ReasoningOptions(),
        safety_identifier=body.safety_identifier,
        service_tier="default",
        store=body.store is not False,
        temperature=turn.params.temperature,
        text=TextOptions(format=(text.format or {"type": "text"}), verbosity=text.verbosity),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=turn.params.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )


# ---- in the background ----------------------------------------------------------------------------------------
async def _in_background(server: "Server", generation: Generation, answer: _Answer, *, is_stream: bool) -> Response:
    """Make it in a task of its own; the client comes back for it, or reads the task's events."""
    run = Run(stop=lambda: server.engine.cancel(generation, ClientGone()))
    answer.stored.run = run
    answer.keep()

    async def work() -> None:
        try:
            async for event in answer.events(generation):
                run.add([event])
            run.add([], is_done=True)
        except ClientGone:
            answer.builder.cancel()
            run.add([], is_done=True)
            answer.keep()
        except Exception as error:  # noqa: BLE001 - told to the client, and logged if it is unknown
            failure = as_api_error(error, generation.id)
            server.engine.cancel(generation, failure)
            run.add(answer.failed(failure), is_done=True)

    run.task = asyncio.create_task(work())
    if is_stream:
        return _replay(server, run.read(), generation.id)
    return JsonResponse(answer.stored.response, headers={"x-request-id": generation.id})


def _replay(server: "Server", events: AsyncIterator[ResponseEvent], request_id: str) -> Response:
    """The events of a response that is, or was, made in the background; it goes on without this client."""

    async def encoded() -> AsyncIterator[bytes]:
        async for event in events:
            yield named_event(event)

    config = server.config.server
    return EventStream(
        encoded(),
        on_gone=lambda: None,
        ping_interval_s=config.ping_interval_s,
        send_timeout_s=config.send_timeout_s,
        headers={"x-request-id": request_id},
    )
