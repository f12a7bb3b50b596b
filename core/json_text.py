"""Reading JSON that others wrote."""

import json
from collections.abc import Callable
from typing import Any


def parse_json(text: str | bytes, *, make: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """A JSON value. Raises ValueError for text that is none, or that is nested more deeply than Python can read.

    make: of the pairs of an object; what it raises passes through.
    """
    try:
        return json.loads(text, object_pairs_hook=make)
    except RecursionError:
        raise ValueError("nested too deeply") from None
