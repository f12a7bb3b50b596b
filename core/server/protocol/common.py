"""Parts that requests and responses of several routes share."""

import time
import uuid
from typing import Annotated, Any

import msgspec

from ...errors import RequestError
from ...sampling.params import SamplingParams

Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""A number of a request: what is larger fits neither the frames to the engine nor any array."""


NO_TEMPLATE = "templates come with the model or --chat-template, not with a request"
"""Why `chat_template` is refused: a template is a program, and may run for ever."""


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream brings besides text."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class ResponseFormat(msgspec.Struct, kw_only=True):
    """The form of the output: text, json_object, json_schema, or vLLM's regex, choice and grammar."""

    type: str
    json_schema: dict[str, Any] | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """The fields of a request that become sampling parameters, by their own names. None: the model's default."""

    n: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: Int | None = None
    logits_processors: list[str] | None = None
    logits_processors_args: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None


class GenerationFields(SamplingFields, kw_only=True):
    """What the routes that generate text have in common besides sampling."""

    model: str | None = None
    """which model; None is the one that is served"""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: Int | None = 0
    """smaller runs first, if the server's policy is priority"""
    cache_salt: str | None = None
    """requests share prefixes only within one salt"""
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    use_beam_search: bool | None = None
    truncate_prompt_tokens: Int | None = None
    """keep so many tokens of the end of a prompt; -1: as many as leave room for max_tokens"""
    return_tokens_as_token_ids: bool | None = False
    """log probabilities name tokens by their ids, as token_id:5, so that no two have one name"""
    return_token_ids: bool | None = False


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """Of the prompt's tokens."""

    cached_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    """Tokens that a request took."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class Timings(msgspec.Struct, kw_only=True):
    """Where a request's time went, in seconds; tokens/s while decoding."""

    queue_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None
    itl_s: float | None = None
    """mean time between two tokens of one completion"""
    tokens_per_s: float | None = None


def sampling_params(request: SamplingFields, defaults: SamplingParams, **fixed: Any) -> SamplingParams:
    """The parameters of a request over the model's defaults; `fixed` are those that a route names otherwise.

    Raises RequestError.
    """
    chosen: dict[str, Any] = {name: getattr(defaults, name) for name in _DEFAULTED}
    for name in _NAMES:
        value = getattr(request, name)
        if value is not None:
            chosen[name] = value
    chosen["extra_args"] = {**(request.vllm_xargs or {}), **(request.logits_processors_args or {})}
    chosen.update(fixed)
    return SamplingParams(**chosen)


def refuse(request: Any, reasons: dict[str, str]) -> None:
    """Raise RequestError for the first of these fields that the request sets: nothing is silently left out."""
    if isinstance(request, GenerationFields):
        reasons = {**reasons, **_UNSUPPORTED}
        if request.stream_options is not None and not request.stream:
            raise RequestError("stream_options: only streams have any; set stream", code="invalid_request")
    for name, reason in reasons.items():
        if getattr(request, name):
            raise RequestError(f"{name}: {reason}", code="unsupported_parameter")


def new_id(prefix: str) -> str:
    """An id for a response. prefix: as clients know it, such as "chatcmpl-" or "resp_"."""
    return f"{prefix}{uuid.uuid4().hex}"


def now() -> int:
    """Seconds since 1970, as `created` has them."""
    return int(time.time())


_UNSUPPORTED = {
    "use_beam_search": "this server samples; send n or best_of",
}
_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_NAMES = tuple(
    name for name in SamplingFields.__struct_fields__ if name not in ("vllm_xargs", "logits_processors_args")
)
