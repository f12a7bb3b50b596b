"""One request's grammar together with what else its sampling parameters say about which tokens may come."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from ..errors import HeadraceError
from ..stages import IntArray
from .compiler import ForcingMatcher, Matcher


class Constraint:
    """The tokens that a request may sample next.

    Beside the grammar: only `allowed` tokens (None: all), except that a text that must end may end; and no end
    (`ends`, and `stops` during the first min_tokens) as long as the grammar can go on. All are bits as fill_mask
    sets them.

    Invariant: while a mask is being filled by another thread, nobody else is at the matcher.
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
        self._failure = ""
        self._matcher = matcher
        self._forcing = matcher if isinstance(matcher, ForcingMatcher) else None
        self._ends = ends
        self._stops = stops
        self._allowed = None if allowed is None else allowed | ends
        self._ignore_eos = ignore_eos
        self._min_tokens = min_tokens
        self._filling: Future[IntArray] | None = None

    @property
    def failure(self) -> str:
        """Why the output cannot go on, "" while it can."""
        self._settle()
        return self._failure

    def is_filled_by(self, filling: "Future[IntArray]") -> None:
        """Another thread calls `fill_mask` until `filling` is done."""
        self._filling = filling

    def accept(self, token_ids: Sequence[int]) -> None:
        """Tokens that the output got."""
        if self.failure:
            return
        count = len(token_ids)
        with self._own_failure("go on"):
            count = self._matcher.accept(token_ids)
        if count < len(token_ids):
            self._failure = (
                f"structured output: token {token_ids[count]} was sampled although the grammar does not allow it; "
                "logit_bias, bad_words or a logits processor left no other one"
            )

    def fill_mask(self, row: IntArray, num_output_tokens: int) -> None:
        """Set the bits of the tokens that may come next; only ends after a failure. Raises nothing."""
        if not self._failure:
            with self._own_failure("make a mask"):
                self._fill(row, num_output_tokens)
        if self._failure:
            row[:] = self._ends

    def take_forced(self, limit: int) -> list[int]:
        """Accept the next tokens as long as only one may come, at most `limit`; an end is the last of them.

        Sampling would have found the same tokens, one forward pass for each.
        """
        forced: list[int] = []
        while self._forcing is not None and len(forced) < limit and not self.failure:
            token = None
            with self._own_failure("look ahead"):
                token = self._forcing.forced_token()
            if token is None or not _has(self._allowed, token):
                break
            forced.append(token)
            self.accept((token,))
            if _has(self._ends, token):
                break
        return forced

    @contextmanager
    def _own_failure(self, what: str) -> Iterator[None]:
        """An error of the library, which is a plugin's code and may raise anything, is this request's alone."""
        try:
            yield
        except HeadraceError as error:
            self._failure = error.reason
        except Exception as error:  # noqa: BLE001 - told to whoever asked
            self._failure = f"structured output: the grammar could not {what}: {type(error).__name__}: {error}"

    def _settle(self) -> None:
        filling, self._filling = self._filling, None
        if filling is not None:
            filling.result()

    def _fill(self, row: IntArray, num_output_tokens: int) -> None:
        self._matcher.fill_mask(row)
        if self._allowed is not None:
            row &= self._allowed
        unwanted = self._stops if num_output_tokens < self._min_tokens else self._ends if self._ignore_eos else None
        if unwanted is not None and (row & ~unwanted).any():
            row &= ~unwanted
        if not row.any():
            self._failure = "structured output: allowed_token_ids leaves no token that the grammar allows here"


def _has(mask: IntArray | None, token: int) -> bool:
    return mask is None or bool(mask[token // 32] >> token % 32 & 1)
