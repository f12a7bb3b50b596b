"""Token ids as callers give them, and how messages name what is none."""

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

from ..errors import RequestError


def token_ids(given: object) -> list[int]:
    """Token ids out of a list, an array or the like. Raises RequestError if they are no whole numbers."""
    is_list = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping | set | frozenset)
    if not is_list:
        raise RequestError(
            f"prompt_token_ids must be a list of token ids, got {describe(given)}", code="invalid_prompt"
        )
    ids: list[Any] = list(given)  # type: ignore[call-overload]
    for place, token in enumerate(ids):
        if type(token) is not int and (isinstance(token, bool) or not isinstance(token, Integral)):
            raise RequestError(
                f"prompt_token_ids[{place}] must be a token id, got {describe(token)}", code="invalid_prompt"
            )
    return [int(token) for token in ids]


def describe(value: object) -> str:
    """A value for a message: short, with its type where that is what is wrong."""
    if value is None or isinstance(value, bool | int | float):
        return f"{value!r:.60}"
    text = f"{value!r:.60}"
    return f"{type(value).__name__} {text}"
