"""Types of Anthropic's /v1/messages: blocks in, blocks out, and the events of a stream."""

from typing import Any, Literal

import msgspec

from .common import Int, SamplingFields, Timings

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class PromptFields(SamplingFields, kw_only=True):
    """What makes the prompt, and how it is gone on from."""

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    """{"type": "enabled" | "adaptive" | "disabled"}, for models whose template can turn it on and off"""
    output_config: dict[str, Any] | None = None
    """effort, and format: {"type": "json_schema", "schema": ...}"""
    container: Any = None
    mcp_servers: list[Any] | None = None


class MessagesRequest(PromptFields, kw_only=True):
    """The next message of the assistant is asked for. A last message that is its own is gone on with."""

    max_tokens: Int
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None


class CountTokensRequest(PromptFields, kw_only=True):
    """How many tokens a request's prompt has is asked for."""


class TokenCount(msgspec.Struct, kw_only=True):
    """So many."""

    input_tokens: int


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """What the model says."""

    text: str = ""


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """What the model thinks."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A tool that is to be called."""

    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct, kw_only=True):
    """Tokens that a message took. input_tokens: of the prompt, without those that the prefix cache had."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0


class Message(msgspec.Struct, kw_only=True):
    """The assistant's message."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    timings: Timings | msgspec.UnsetType = msgspec.UNSET


class Delta(msgspec.Struct, kw_only=True):
    """More of a block, with one of the texts; or how the message ended."""

    type: str | msgspec.UnsetType = msgspec.UNSET
    text: str | msgspec.UnsetType = msgspec.UNSET
    thinking: str | msgspec.UnsetType = msgspec.UNSET
    signature: str | msgspec.UnsetType = msgspec.UNSET
    partial_json: str | msgspec.UnsetType = msgspec.UNSET
    stop_reason: StopReason | None | msgspec.UnsetType = msgspec.UNSET
    stop_sequence: str | None | msgspec.UnsetType = msgspec.UNSET


class MessageEvent(msgspec.Struct, kw_only=True):
    """One event of a stream; each type has some of the fields."""

    type: str
    message: Message | msgspec.UnsetType = msgspec.UNSET
    index: int | msgspec.UnsetType = msgspec.UNSET
    content_block: Block | msgspec.UnsetType = msgspec.UNSET
    delta: Delta | msgspec.UnsetType = msgspec.UNSET
    usage: MessageUsage | msgspec.UnsetType = msgspec.UNSET


class MessageError(msgspec.Struct, kw_only=True):
    """What went wrong."""

    type: str
    message: str


class MessageErrorEnvelope(msgspec.Struct, kw_only=True):
    """The body of every error of these routes, and of the last event of a stream that breaks off."""

    type: Literal["error"] = "error"
    error: MessageError
