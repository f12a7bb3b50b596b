"""Types of /v1/responses: items in, items out, and the events of a stream."""

from typing import Any, Literal

import msgspec

from .chat import ContentLogprob
from .common import Int, SamplingFields, Timings

Status = Literal["completed", "failed", "in_progress", "cancelled", "queued", "incomplete"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """How much the model is to think. No summary is made: the reasoning itself is given."""

    effort: str | None = None
    summary: str | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    """The form of the text. format: {"type": "text" | "json_object" | "json_schema", "name", "schema", "strict"}."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class InputFields(SamplingFields, kw_only=True):
    """What makes the prompt, and how it is gone on from."""

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    """a text, or items: messages, reasoning, calls and their outputs"""
    instructions: str | None = None
    """a system message for this response alone"""
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """auto drops the oldest turns of a conversation that is too long"""
    chat_template_kwargs: dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    conversation: str | dict[str, Any] | None = None


class ResponsesRequest(InputFields, kw_only=True):
    """One response is asked for."""

    max_output_tokens: Int | None = None
    max_tool_calls: Int | None = None
    top_logprobs: Int | None = None
    include: list[str] | None = None
    store: bool | None = True
    background: bool | None = False
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    priority: Int | None = 0
    cache_salt: str | None = None


class InputTokensRequest(InputFields, kw_only=True):
    """How many tokens a request's prompt has is asked for."""


class InputTokens(msgspec.Struct, kw_only=True):
    """So many."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """Text of a message."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ContentLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """What the model thought."""

    text: str = ""


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """What the model says."""

    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus = "in_progress"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thinks."""

    id: str
    status: ItemStatus = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText]


class FunctionCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A tool that is to be called; arguments are JSON."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: ItemStatus = "in_progress"


OutputItem = OutputMessage | ReasoningItem | FunctionCall


class ResponseError(msgspec.Struct, kw_only=True):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct, kw_only=True):
    """Why a response ended early."""

    reason: Literal["max_output_tokens", "content_filter"]


class InputTokensDetails(msgspec.Struct, kw_only=True):
    """Of the prompt's tokens."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    """Of the output's tokens."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Tokens that a response took."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response: what came of it so far, and what was asked for."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningOptions
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: TextOptions
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    user: str | None
    timings: Timings | msgspec.UnsetType = msgspec.UNSET


class ResponseEvent(msgspec.Struct, kw_only=True):
    """One event of a stream; each type has some of the fields."""

    type: str
    sequence_number: int
    response: ResponseObject | msgspec.UnsetType = msgspec.UNSET
    item_id: str | msgspec.UnsetType = msgspec.UNSET
    output_index: int | msgspec.UnsetType = msgspec.UNSET
    content_index: int | msgspec.UnsetType = msgspec.UNSET
    item: OutputItem | msgspec.UnsetType = msgspec.UNSET
    part: OutputText | ReasoningText | msgspec.UnsetType = msgspec.UNSET
    delta: str | msgspec.UnsetType = msgspec.UNSET
    text: str | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET
    logprobs: list[ContentLogprob] | msgspec.UnsetType = msgspec.UNSET


class ItemList(msgspec.Struct, kw_only=True):
    """Items of a response's input."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


class DeletedResponse(msgspec.Struct, kw_only=True):
    """A response that is kept no longer."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True
