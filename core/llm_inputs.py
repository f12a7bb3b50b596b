"""What callers of the Python API give, in the types that the engine takes; errors name what is wrong."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import numpy as np

from .errors import RequestError
from .sampling.params import MAX_COMPLETIONS, SamplingParams
from .stages import FloatArray
from .suggest import did_you_mean
from .text.inputs import describe


class TokensPrompt(TypedDict):
    """A prompt that is already token ids."""

    prompt_token_ids: Sequence[int]


class ImagePrompt(TypedDict, total=False):
    """A prompt with images, as text or as token ids; {"image": ...} holds one of them or a list.

    An image is a picture of Pillow, a path, the bytes of a file, or a data: or http(s) URL. The prompt has the
    model's placeholder once for each; without any, the images come first.
    """

    prompt: str
    prompt_token_ids: Sequence[int]
    multi_modal_data: Mapping[str, Any]


class EncoderDecoderPrompt(TypedDict, total=False):
    """Both prompts of an encoder-decoder model; the decoder's may be left to the model."""

    encoder_prompt: str | TokensPrompt
    decoder_prompt: str | TokensPrompt | None


Prompt = str | TokensPrompt | ImagePrompt | EncoderDecoderPrompt
"""An encoder-decoder model's encoder reads a plain prompt, and its decoder begins as the checkpoint says."""
Lora = str | Sequence[str | None] | None
"""Names of adapters, None and "" for none."""
AudioInput = str | Path | bytes | FloatArray
Message = Mapping[str, Any]
"""{"role": ..., "content": ...} as in the OpenAI API."""

P = TypeVar("P")

PROMPT_KEYS = ("prompt", "prompt_token_ids", "multi_modal_data")
"""What a prompt may hold as a mapping, for a model that has no encoder of texts."""


def as_many(given: object, what: str, is_one: Callable[[object], bool]) -> list[Any]:
    """One or many as a list. what: for messages, such as "prompts"; is_one: tells one from many of them.

    Raises RequestError for what has no order, or is nothing of the kind.
    """
    if is_one(given):
        return [given]
    if not isinstance(given, Iterable) or isinstance(given, bytes | Mapping | set | frozenset):
        raise RequestError(f"{what} must be one or a list of them, got {describe(given)}")
    return list(given)


def is_one_prompt(given: object) -> bool:
    """True for a text or a mapping; anything else holds several prompts."""
    return isinstance(given, str | Mapping)


def check_keys(prompt: Mapping[Any, Any]) -> None:
    """Raise RequestError for a key of a prompt that means nothing here."""
    for key in prompt:
        if key not in PROMPT_KEYS:
            near = did_you_mean(str(key), PROMPT_KEYS)
            raise RequestError(f"a prompt has {', '.join(PROMPT_KEYS)}, got {describe(key)}{near}")


def as_conversations(messages: Any) -> list[Any]:
    """One conversation, or several, as a list of conversations. Raises RequestError."""
    many = as_many(messages, "messages", lambda given: isinstance(given, str | Mapping))
    if isinstance(messages, str | Mapping):
        raise RequestError(
            f"messages must be a list such as [{{'role': 'user', 'content': ...}}], got {describe(messages)}",
            code="invalid_messages",
        )
    if not many:
        raise RequestError("there is no message to answer", code="empty_prompt")
    are_messages = [isinstance(each, Mapping) for each in many]
    if any(are_messages):
        return [many]
    return many


def as_messages(conversation: object) -> list[Any]:
    """The messages of one conversation. Raises RequestError if it is no list of mappings."""
    messages = as_many(conversation, "messages", lambda given: isinstance(given, str))
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(
                f"messages[{index}] must be an object with role and content, got {describe(message)}",
                code="invalid_messages",
            )
    return messages


def as_recordings(audio: object) -> list[Any]:
    """One recording or several as a list. Raises RequestError."""
    many = as_many(audio, "recordings", lambda given: isinstance(given, str | bytes | Path | np.ndarray))
    for each in many:
        if not isinstance(each, str | bytes | Path | np.ndarray):
            raise RequestError(
                f"a recording is a file, the bytes of one, or samples in an array, got {describe(each)}"
            )
    return many


def flat_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a chat template, those in chat_template_kwargs among them. Raises RequestError."""
    more = options.get("chat_template_kwargs") or {}
    source = options.get("chat_template")
    if not isinstance(more, Mapping):
        raise RequestError(f"chat_template_kwargs must be a mapping, got {describe(more)}")
    if source is not None and not isinstance(source, str):
        raise RequestError(f"chat_template must be the text of a template, got {describe(source)}")
    return {**{name: value for name, value in options.items() if name != "chat_template_kwargs"}, **more}


def as_texts(given: object, what: str) -> list[str]:
    """One text or several as a list. Raises RequestError."""
    many = as_many(given, what, lambda value: isinstance(value, str))
    for text in many:
        if not isinstance(text, str):
            raise RequestError(f"{what} must be texts, got {describe(text)}")
    return many


def images_of(data: Any) -> list[Any]:
    """The images of a prompt's multi_modal_data. Raises RequestError."""
    if data is None:
        return []
    if not isinstance(data, Mapping) or set(data) - {"image"}:
        raise RequestError('multi_modal_data is {"image": one image or a list}', code="invalid_image")
    found = data.get("image")
    return [] if found is None else list(found) if isinstance(found, list | tuple) else [found]


def as_params(given: Any, kind: type[P], name: str) -> P:
    """Parameters of a method: None is what they are without any. Raises RequestError for what is none."""
    if given is None:
        return kind()
    if not isinstance(given, kind):
        raise RequestError(
            f"{name} must be {kind.__name__}, got {describe(given)}",
            remedies=[f"leave {name} out", f"{kind.__name__}()"],
        )
    return given


def params_each(given: object, count: int, default: SamplingParams) -> list[SamplingParams]:
    """The sampling parameters of each prompt. given: None for `default`, one for all, or as many as prompts."""
    if given is None:
        return [default] * count
    each = _one_each(given, count, "sampling_params")
    for params in each:
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params must be SamplingParams, got {describe(params)}",
                code="invalid_sampling_params",
                remedies=["SamplingParams(max_tokens=16)"],
            )
        if params.n > MAX_COMPLETIONS:
            raise RequestError(f"n must be at most {MAX_COMPLETIONS}, got {params.n}", code="invalid_sampling_params")
    return each


def priorities_each(given: object, count: int) -> list[int]:
    """The priority of each prompt. Raises RequestError for what is no number of 64 bits."""
    each = _one_each(given, count, "priority")
    for priority in each:
        is_number = isinstance(priority, Integral) and not isinstance(priority, bool)
        if not is_number or not -(2**63) <= int(priority) < 2**63:
            raise RequestError(f"priority must be a whole number of 64 bits, got {describe(priority)}")
    return [int(priority) for priority in each]


def loras_each(given: object, count: int) -> list[str]:
    """The name of each prompt's adapter, "" for none. Raises RequestError for what is no name."""
    each = _one_each(given, count, "lora")
    for name in each:
        if name is not None and not isinstance(name, str):
            raise RequestError(f"lora must be the name of an adapter, got {describe(name)}")
    return [name or "" for name in each]


def check_salt(cache_salt: object) -> str:
    """A cache salt that is text. Raises RequestError."""
    if not isinstance(cache_salt, str):
        raise RequestError(f"cache_salt must be text, got {describe(cache_salt)}")
    return cache_salt


def _one_each(value: Any, count: int, name: str) -> list[Any]:
    is_many = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    if not is_many:
        return [value] * count
    many = list(value)
    if len(many) != count:
        raise RequestError(f"{count} prompts need {count} {name}, got {len(many)}")
    return many
