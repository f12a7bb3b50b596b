"""Recurrences give the same whatever steps their positions are computed in, and write no state but their own."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from headrace.core.ops import OpTable

OPS: Any = OpTable()
TOKENS = 23
Step = Callable[[slice, torch.Tensor, torch.Tensor, int], torch.Tensor]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def causal_conv() -> tuple[torch.Tensor, Step]:
    x, weight, bias, state = normal(TOKENS, 10), normal(10, 1, 4), normal(10), torch.full((4, 3, 10), torch.nan)

    def step(part: slice, before: torch.Tensor, kept: torch.Tensor, most: int) -> torch.Tensor:
        out: torch.Tensor = OPS.causal_conv(
            x[part], weight, bias, state, rows(part), before, kept, activation="silu"
        )[0]
        return out

    return state, step


def selective_scan() -> tuple[torch.Tensor, Step]:
    inputs = (normal(TOKENS, 4, 3), normal(TOKENS, 4), normal(TOKENS, 2, 6), normal(TOKENS, 2, 6, seed=1))
    vectors, state = (normal(4), normal(4, seed=1), normal(4, seed=2)), torch.full((4, 4, 3, 6), torch.nan)

    def step(part: slice, before: torch.Tensor, kept: torch.Tensor, most: int) -> torch.Tensor:
        arrays = [array[part] for array in inputs]
        out: torch.Tensor = OPS.selective_scan(
            *arrays, *vectors, state, rows(part), before, kept, max_query_len=most
        )[0]
        return out

    return state, step


def gated_delta() -> tuple[torch.Tensor, Step]:
    inputs = (normal(TOKENS, 2, 6), normal(TOKENS, 2, 6, seed=1), normal(TOKENS, 4, 3), normal(TOKENS, 4, 6))
    vectors, state = (normal(4), normal(24)), torch.full((4, 4, 6, 3), torch.nan)

    def step(part: slice, before: torch.Tensor, kept: torch.Tensor, most: int) -> torch.Tensor:
        arrays = [array[part] for array in (*inputs, normal(TOKENS, 4, seed=2))]
        out: torch.Tensor = OPS.gated_delta(*arrays, *vectors, state, rows(part), before, kept, max_query_len=most)[0]
        return out

    return state, step


def wkv() -> tuple[torch.Tensor, Step]:
    inputs, state = (30 * normal(TOKENS, 10), normal(TOKENS, 10, seed=1)), torch.full((4, 3, 10), torch.nan)
    vectors = (normal(10), normal(10, seed=1))

    def step(part: slice, before: torch.Tensor, kept: torch.Tensor, most: int) -> torch.Tensor:
        arrays = [array[part] for array in inputs]
        out: torch.Tensor = OPS.wkv(*arrays, *vectors, state, rows(part), before, kept, max_query_len=most)[0]
        return out

    return state, step


def rows(part: slice) -> torch.Tensor:
    return torch.tensor([0, part.stop - part.start], dtype=torch.int32)


def run(make: Callable[[], tuple[torch.Tensor, Step]], ends: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(outputs of all tokens, the last state), computed in steps that end there; states go from slot to slot."""
    state, step = make()
    outputs, start = [], 0
    for n, end in enumerate(ends):
        kept = torch.full((end - start,), -1, dtype=torch.int32)
        kept[-1] = 1 + (n + 1) % 2
        before = torch.tensor([[-1 if start == 0 else 1 + n % 2]], dtype=torch.int32)
        outputs.append(step(slice(start, end), before, kept, 1 if end - start == 1 else 0))
        start = end
    assert state[3].isnan().all(), "a slot of nobody was written"
    return torch.cat(outputs), state[1 + len(ends) % 2]


@pytest.mark.parametrize("make", [causal_conv, selective_scan, gated_delta, wkv])
@pytest.mark.parametrize("ends", [[5, 6, 7, 20, TOKENS], range(1, TOKENS + 1), [TOKENS - 1, TOKENS]])
def test_steps_do_not_matter(make: Callable[[], tuple[torch.Tensor, Step]], ends: Sequence[int]) -> None:
    expected, last = run(make, [TOKENS])
    got, state = run(make, ends)
    # One order of sums; torch's own exp and sum differ in the last bit between the inside and the end of a vector.
    np.testing.assert_allclose(got.numpy(), expected.numpy(), rtol=0, atol=1e-5)
    np.testing.assert_allclose(state.numpy(), last.numpy(), rtol=0, atol=1e-5)
