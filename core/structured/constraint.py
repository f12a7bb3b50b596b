"""One request's grammar together with what else its sampling parameters say about which tokens may come."""

from collections.abc import Sequence

import numpy as np

from ..errors import HeadraceError
from ..stages import IntArray
from .compiler import Matcher


class Constraint:
    """The tokens that a request may sample next.

    Beside the grammar: only `allowed` tokens (None: all), except that a text that must end may end; and no end
    (`ends`, and `stops` during the first min_tokens) as long as the grammar can go on. All are bits as fill_mask
    sets them. `failure` says why the output cannot go on, "" while it can.
    """

    def __init__(
        self,
        matcher: Matcher,
        *,
        ends: IntArray,
        stops: IntArray,
        allowed: IntArray | None,
        ignore_eos: bool,
        min_tokens: int,
    ) -> None:
        self.failure = ""
        self._matcher = matcher
        self._ends = ends
        self._stops = stops
        self._allowed = None if allowed is None else allowed | ends
        self._ignore_eos = ignore_eos
        self._min_tokens = min_tokens
        self._ahead: tuple[int, IntArray] | None = None  # the mask of the next token, by its number, if it is known

    def accept(self, token_ids: Sequence[int]) -> None:
        """Tokens that the output got."""
        if self.failure:
            return
        self._ahead = None
        count = self._matcher.accept(token_ids)
        if count < len(token_ids):
            self.failure = (
                f"structured output: token {token_ids[count]} was sampled although the grammar does not allow it; "
                "logit_bias, bad_words or a logits processor left no other one"
            )

    def fill_mask(self, row: IntArray, num_output_tokens: int) -> None:
        """Set the bits of the tokens that may come next; only ends after a failure."""
        if self._ahead is not None and self._ahead[0] == num_output_tokens:
            row[:] = self._ahead[1]
        elif not self.failure:
            self._fill(row, num_output_tokens)
        if self.failure:
            row[:] = self._ends

    def take_forced(self, num_output_tokens: int, limit: int) -> list[int]:
        """Accept the next tokens as long as only one may come, at most `limit`; an end is the last of them.

        Sampling would have found the same tokens, one forward pass for each.
        """
        forced: list[int] = []
        row = np.empty_like(self._ends)
        while len(forced) < limit:
            self.fill_mask(row, num_output_tokens + len(forced))
            if self.failure:
                break
            words = row.nonzero()[0]
            bits = int(row[words[0]]) & 0xFFFFFFFF
            if len(words) > 1 or bits & (bits - 1):
                self._ahead = num_output_tokens + len(forced), row
                break
            forced.append(int(words[0]) * 32 + bits.bit_length() - 1)
            self.accept(forced[-1:])
            if (row & self._ends).any():
                break
        return forced

    def _fill(self, row: IntArray, num_output_tokens: int) -> None:
        try:
            self._matcher.fill_mask(row)
        except HeadraceError as error:
            self.failure = error.reason
            return
        if self._allowed is not None:
            row &= self._allowed
        unwanted = self._stops if num_output_tokens < self._min_tokens else self._ends if self._ignore_eos else None
        if unwanted is not None and (row & ~unwanted).any():
            row &= ~unwanted
        if not row.any():
            self.failure = "structured output: allowed_token_ids leaves no token that the grammar allows here"
