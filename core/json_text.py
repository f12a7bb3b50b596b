"""Reading JSON that others wrote."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """A JSON value. Raises ValueError for text that is none, or that is nested more deeply than Python can read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
