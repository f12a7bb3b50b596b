"""Unknown fields of a body, or within one: other engines' names are errors that say ours, the rest are told."""

import logging
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from ..other_names import other_name
from ..suggest import did_you_mean
from .api_errors import ApiError
from .nested_fields import NESTED, unknown_within

logger = logging.getLogger(__name__)

HEADER = "x-ignored-fields"
_MEANINGLESS = frozenset((
    "metadata", "moderation", "prediction", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
    "safety_identifier", "service_tier", "store", "user", "verbosity",  # OpenAI's
    "background_options", "betas", "cache_control", "context_management", "diagnostics", "inference_geo", "speed",
    "user_profile_id", "workspace_id",  # Anthropic's
    "cache_prompt", "request_id", "stream", "timings_per_token", "return_progress",  # vLLM's and llama.cpp's
))  # fmt: skip
"""What clients send as a matter of course, and what would change no answer of this server."""
_SPELLED = {
    "max_tokens": ("max_tokens", "max_output_tokens"),
    "structured_output": ("structured_outputs", "text", "output_config"),
    "stop": ("stop_sequences", "stop"),
    "logprobs": ("logprobs", "top_logprobs"),
}
"""Our name of a parameter -> what routes call it, the first that a route has."""
_ELSEWHERE = {
    "max_tokens": "max_tokens", "max_output_tokens": "max_tokens", "structured_output": "structured_output",
    "stop": "stop", "logprobs": "logprobs", "top_logprobs": "logprobs",
}  # fmt: skip
"""What another route calls a parameter of ours -> our name."""
_MISPLACED = {
    "extra_body": "what a client's extra_body holds stands in the body itself",
    "options": "options stand in the body itself",
    "parameters": "parameters stand in the body itself",
    "enable_thinking": 'send "chat_template_kwargs": {"enable_thinking": ...}',
    "response_format": "the form of the output is text.format, output_config.format or structured_outputs here",
    "messages": "conversations go to /v1/chat/completions",
    "prompt": "prompts go to /v1/completions",
}
"""What stands elsewhere in a body, or in another route's, and would change the answer."""
_MISPLACED_WITHIN = {
    "response_format.schema": 'send {"type": "json_schema", "json_schema": {"schema": ...}}',
    "response_format.value": "the form stands in structured_outputs",
    "tools.function.input_schema": "headrace calls it parameters",
}
"""The same of what stands within a field."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "repetition_penalty": (1,), "min_tokens": (0,), "logprobs": (0,), "logits_processors": (0,),
    "do_sample": (True,), "response_format": ({"type": "text"},),
}  # fmt: skip
"""Values with which nothing is asked for, by their name or ours."""
_MAX_TOLD = 1000
_MAX_LISTED = 8
_BODY = msgspec.json.Decoder(dict[str, msgspec.Raw])


class UnknownFields:
    """What the log was told of: each name once, and not without end."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def check(
        self,
        body: bytes,
        fields: Collection[str],
        path: str,
        is_read: Callable[[str], bool] = lambda _name: False,
        value: object = None,
    ) -> str:
        """The value of HEADER for a body of a route with these fields, or "".

        body: valid JSON, an object; value: what it was read as, if it was. is_read: whether the chat template reads a
        name. Raises ApiError for a name that would change the answer if it were ours.
        """
        ignored: dict[str, Collection[str]] = {}
        for name, raw in _BODY.decode(body).items():
            if len(ignored) >= _MAX_TOLD:
                break
            if name in fields:
                if name in NESTED:
                    self._check_within(name, _inner(value, name, raw), is_read, ignored)
                continue
            if name in _MEANINGLESS or (given := msgspec.json.decode(raw)) is None:
                continue
            reason = _reason(name, given, fields)
            if reason:
                raise ApiError(400, f"{name}: {reason}", code="unknown_parameter", param=name)
            ignored[name] = fields
        listed = list(ignored)[:_MAX_LISTED]
        for name in listed:
            self._tell(name, ignored[name], path)
        return ", ".join(map(_printable, listed)) + (", ..." if len(ignored) > _MAX_LISTED else "")

    def _check_within(
        self, field: str, value: Any, is_read: Callable[[str], bool], ignored: dict[str, Collection[str]]
    ) -> None:
        for place, known in unknown_within(field, value, is_read):
            if place in _MISPLACED_WITHIN:
                raise ApiError(400, f"{place}: {_MISPLACED_WITHIN[place]}", code="unknown_parameter", param=field)
            ignored[place] = known
            if len(ignored) >= _MAX_TOLD:
                break

    def _tell(self, name: str, fields: Collection[str], path: str) -> None:
        if name in self._told or len(self._told) >= _MAX_TOLD:
            return
        self._told.add(name)
        hint = "" if _ours(name) else other_name(name)
        logger.warning(
            f"requests have a field that is passed over{hint or did_you_mean(name.rpartition('.')[2][:64], fields)}",
            extra={"fields": {"field": _printable(name), "path": path}},
        )


def _reason(name: str, value: Any, fields: Collection[str]) -> str:
    """Why a field cannot be passed over, or ""."""
    ours = _ours(name)
    if value in (*_NEUTRAL.get(name, ()), *_NEUTRAL.get(ours, ()), "", [], {}):
        return ""
    if name in _MISPLACED:
        return _MISPLACED[name] if "temperature" in fields else ""
    here = next((spelling for spelling in _SPELLED.get(ours, (ours,)) if spelling in fields), "")
    return f"headrace calls it {here}" if here else ""


def _inner(value: object, name: str, raw: msgspec.Raw) -> Any:
    """A field's value as it was sent."""
    read = getattr(value, name, None)
    return read if isinstance(read, list | dict) else msgspec.json.decode(raw)


def _ours(name: str) -> str:
    return _ELSEWHERE.get(name) or other_name(name).partition("headrace calls it ")[2]


def _printable(name: str) -> str:
    return ascii(name[:64])[1:-1]
