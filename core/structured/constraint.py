"""One request's grammar together with what else its sampling parameters say about which tokens may come."""

from collections.abc import Sequence

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

    def accept(self, token_ids: Sequence[int]) -> None:
        """Tokens that the output got."""
        if self.failure:
            return
        count = self._matcher.accept(token_ids)
        if count < len(token_ids):
            self.failure = (
                f"structured output: token {token_ids[count]} was sampled although the grammar does not allow it; "
                "logit_bias, bad_words or a logits processor left no other one"
            )

    def fill_mask(self, row: IntArray, num_output_tokens: int) -> None:
        """Set the bits of the tokens that may come next; only ends after a failure."""
        if not self.failure:
            self._fill(row, num_output_tokens)
        if self.failure:
            row[:] = self._ends

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
