"""Speculation: tokens that a drafter guesses, which the next step verifies.

A row with drafts computes and samples all of its positions as ever. A draft that equals the token sampled for its
place was right, and the token behind it counts; the first that differs ends the row. So the tokens are those of a run
without drafts, whatever the drafter says.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..stages import IntArray, Row, StepOutput


class Drafter(ABC):
    """Guesses how texts go on. One object serves all requests of an engine."""

    @abstractmethod
    def propose(self, token_ids: IntArray, most: int) -> IntArray:
        """At most so many tokens that may follow, none if it has no idea. token_ids [n]: prompt and output so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The sampled positions of a step, in the order of the sampler's rows."""

    rows: list[int]
    """row of the plan"""
    slots: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    """of the token that is sampled"""
    epochs: npt.NDArray[np.int64]
    num_logprobs: list[int]
    """per sample, -1 for none; empty if no request wants any"""
    has_drafts: bool


class Drafts:
    """The drafts of the requests in slots. token_ids: [num_slots, n], the tokens of each slot, which it shares."""

    def __init__(self, drafter: Drafter | None, most: int, token_ids: IntArray) -> None:
        self._drafter = drafter
        self._most = most
        self._token_ids = token_ids
        self._proposed = np.zeros((len(token_ids), most), np.int32)

    def place(self, rows: Sequence[Row], ends: npt.NDArray[np.int64]) -> None:
        """Put drafts where a step looks for its tokens. ends: behind each row's last position."""
        for row, end in zip(rows, ends.tolist(), strict=True):
            if count := row.num_draft_tokens:
                self._token_ids[row.slot, end - count : end] = self._proposed[row.slot, :count]

    def accept(self, samples: Samples, output: StepOutput) -> tuple[Samples, StepOutput]:
        """What counts of a step's samples: of each row as many as follow right drafts."""
        found = output.token_ids
        # A sample's own place holds its draft until it is remembered; a row's last one has none.
        is_right = self._token_ids[samples.slots, samples.positions] == found
        kept: list[int] = []
        for n, row in enumerate(samples.rows):
            if n == 0 or samples.rows[n - 1] != row or (kept[-1] == n - 1 and is_right[n - 1]):
                kept.append(n)
        counted = replace(
            samples,
            rows=[samples.rows[n] for n in kept],
            slots=samples.slots[kept],
            positions=samples.positions[kept],
            epochs=samples.epochs[kept],
            num_logprobs=[samples.num_logprobs[n] for n in kept] if samples.num_logprobs else [],
        )
        logprobs = None if output.logprobs is None else output.logprobs.of_rows(kept)
        return counted, replace(output, token_ids=found[kept], logprobs=logprobs)

    def propose(self, samples: Samples, is_alive: npt.NDArray[np.bool_]) -> dict[int, int] | None:
        """By row of the plan, how many drafts there are for the next one; None without a drafter. Call when the
        samples are remembered; of a row with several the last one counts."""
        if self._drafter is None:
            return None
        counts: dict[int, int] = {}
        last = {row: n for n, row in enumerate(samples.rows) if is_alive[n]}
        for row, n in last.items():
            slot, length = samples.slots[n], int(samples.positions[n]) + 1
            proposed = self._drafter.propose(self._token_ids[slot, :length], self._most)[: self._most]
            self._proposed[slot, : len(proposed)] = proposed
            counts[row] = len(proposed)
        return counts
