"""Drafts by n-gram: what followed the last tokens when they stood in the prompt or the output before."""

from collections.abc import Mapping

import numpy as np

from headrace.core.hooks import hookimpl
from headrace.core.runner.drafts import Drafter
from headrace.core.stages import IntArray

LONGEST, SHORTEST = 4, 2
"""Tokens that must be equal. One alone recurs by chance, and a wrong draft costs a step its time."""


@hookimpl
def headrace_drafters() -> Mapping[str, type[Drafter]]:
    """`--speculative ngram`."""
    return {"ngram": NgramDrafter}


class NgramDrafter(Drafter):
    """Looks back for the longest n-gram that the text ends with, the latest of equally long ones."""

    def propose(self, token_ids: IntArray, most: int) -> IntArray:
        last = len(token_ids) - 1
        # Where the last token stood before, latest first; few, unless a text is of few words.
        ends = np.flatnonzero(token_ids[:last] == token_ids[last])[::-1]
        best = ends[:0]
        for length in range(SHORTEST, LONGEST + 1):
            back = length - 1
            ends = ends[ends >= back]
            ends = ends[token_ids[ends - back] == token_ids[last - back]] if last >= back else ends[:0]
            if not len(ends):
                break
            best = ends
        if not len(best):
            return token_ids[:0]
        # A text that goes in circles goes on in them: what is behind its end is what it begins with.
        first = int(best[0]) + 1
        period = last + 1 - first
        return token_ids[first + np.arange(most) % period]
