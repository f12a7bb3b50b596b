"""The thread that fills masks while the device computes the logits that they are for."""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ..stages import IntArray
from .constraint import Constraint

MaskRow = tuple[int, Constraint, int]
"""(row of the mask, whose tokens are allowed there, output tokens that it has)"""


class MaskFiller:
    """Fills one mask after another, in the order in which they were asked for. The thread begins with the first."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._process_id = os.getpid()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="headrace-masks")

    def start(self, mask: IntArray, rows: Sequence[MaskRow]) -> "Future[IntArray]":
        """Fill these rows of `mask` [num_rows, ceil(vocab_size / 32)], which is the result.

        It never fails: a constraint keeps its own failure. Nobody needs to wait for it: a request that is gone
        leaves a mask that nobody reads.
        """
        if self._process_id != os.getpid():  # a fork leaves threads behind
            self._begin()
        filled = self._pool.submit(_fill, mask, rows)
        for _, constraint, _ in rows:
            constraint.is_filled_by(filled)
        return filled

    def close(self) -> None:
        """Wait for the thread to end."""
        self._pool.shutdown(wait=self._process_id == os.getpid())


def _fill(mask: IntArray, rows: Sequence[MaskRow]) -> IntArray:
    for row, constraint, num_output_tokens in rows:
        constraint.fill_mask(mask[row], num_output_tokens)
    return mask
