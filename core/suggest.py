"""Near names for error messages."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], *, limit: int = 3) -> str:
    """`"; did you mean a, b?"` with the known names nearest to `name`, or "" if none is near."""
    near = difflib.get_close_matches(name, list(known), n=limit, cutoff=0.55)
    return f"; did you mean {', '.join(near)}?" if near else ""
