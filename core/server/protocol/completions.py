"""Types of /v1/completions: text in, text out."""

from typing import Any, Literal

import msgspec

from .common import GenerationFields, Int, Timings, Usage

FinishReason = Literal["stop", "length", "tool_calls", "content_filter", "abort", "error"]


class CompletionRequest(GenerationFields, kw_only=True):
    """A prompt, or several, to be continued."""

    prompt: str | list[Any] | None = None
    """a text, token ids, or a list of either"""
    max_tokens: Int | None = 16
    echo: bool | None = False
    """give the prompt back, in front of the output"""
    logprobs: Int | None = None
    """log probabilities of each token and this many most likely ones"""
    suffix: str | None = None
    """what comes behind the output, for models that fill in the middle"""
    best_of: Int | None = None
    """how many are made of each prompt; the n most likely ones are given"""
    add_special_tokens: bool | None = True


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Log probabilities, one entry a token. text_offset: characters from the start of the prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One continuation, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[Any] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionResponse(msgspec.Struct, kw_only=True):
    """All continuations; in a stream a piece of them."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None | msgspec.UnsetType = msgspec.UNSET
    timings: Timings | msgspec.UnsetType = msgspec.UNSET
