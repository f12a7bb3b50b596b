"""What all ops of the kernels share: a tuning, how many warps a program has, and a count of launches."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import triton

from .interpreter import prepare
from .tuning import Tuning

LAUNCHES: Counter[str] = Counter()
"""Kernel launches of this process by op: the proof that a device runs these kernels."""


class Launcher:
    """Launches kernels on one kind of GPU.

    wide_dot: products take float32, for an interpreter that multiplies the bits of bfloat16.
    """

    def __init__(self, tuning: Tuning, *, wide_dot: bool = False) -> None:
        self.tuning = tuning
        self.wide_dot = wide_dot
        if wide_dot:
            prepare()

    def warps(self, values: int) -> int:
        """Warps for a program that holds this many values."""
        return max(1, min(16, values // 512))

    def rows(self, num_rows: int, values: int) -> int:
        """Rows of a program, of so many values each."""
        most = self.tuning.interpreted_values
        if most:
            tall: int = triton.next_power_of_2(num_rows)
            return max(1, min(tall, most // values))
        return max(1, min(16, self.tuning.row_values // values))

    def room(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """An array to fill, with the dtype of another. Nobody fills the rows of padding and of other ranks' experts,
        which go on through the model: whatever they hold on a GPU, zeros where the interpreter would warn of it."""
        make = torch.zeros if self.wide_dot else torch.empty
        return make(shape, dtype=like.dtype, device=like.device)

    def launch(self, op: str, kernel: Any, grid: Sequence[int], *args: Any, **options: Any) -> None:
        """Run a kernel over a grid; nothing is run over an empty one."""
        if 0 in grid:
            return
        LAUNCHES[op] += 1
        kernel[tuple(grid)](*args, **options)
