"""The numpy ops between logits and tokens, against the definitions in torch."""

from typing import Any

import numpy as np
import pytest
import torch

from headrace.core.ops import OpTable

pytest.importorskip("headrace.kernels.cpu._ops", reason="the native kernels were not built")

from headrace.platforms.cpu.native.sampling import sampling_ops

VOCAB = 97


def both(name: str, *arguments: Any, **options: Any) -> tuple[Any, Any]:
    """(ours, the definition's) results of one op on the same numpy arguments."""
    tensors = [torch.from_numpy(a.copy()) if isinstance(a, np.ndarray) else a for a in arguments]
    return getattr(sampling_ops(), name)(*arguments, **options), getattr(OpTable, name)(*tensors, **options)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def logits(rng: np.random.Generator) -> Any:
    return (rng.standard_normal((5, VOCAB)) * 3).astype(np.float32)


def test_token_mask(rng: np.random.Generator, logits: Any) -> None:
    mask = rng.integers(-(2**31), 2**31, (5, -(-VOCAB // 32)), dtype=np.int64).astype(np.int32)
    ours, expected = both("apply_token_mask", logits, mask)
    np.testing.assert_array_equal(ours, expected.numpy())


def test_logit_bias_adds_up(logits: Any) -> None:
    rows = np.array([0, 0, 0, 4], np.int32)
    tokens = np.array([3, 3, 96, 0], np.int32)
    values = np.array([1.5, 2.0, -np.inf, 7.0], np.float32)
    before = logits.copy()
    ours, expected = both("add_logit_bias", logits, rows, tokens, values)
    np.testing.assert_allclose(ours, expected.numpy(), rtol=1e-6)
    np.testing.assert_array_equal(logits, before)


def test_penalties(rng: np.random.Generator, logits: Any) -> None:
    rows = np.repeat(np.arange(5, dtype=np.int32), 6)
    tokens = np.concatenate([rng.permutation(VOCAB)[:6] for _ in range(5)]).astype(np.int32)
    counts = rng.integers(0, 3, 30).astype(np.int32)
    each = [rng.uniform(low, 2, 5).astype(np.float32) for low in (0.5, -2, -2)]
    ours, expected = both("apply_penalties", logits, rows, tokens, counts, *each)
    np.testing.assert_allclose(ours, expected.numpy(), rtol=1e-6)


@pytest.mark.parametrize("num_logprobs", [0, 1, 5, VOCAB])
def test_logprobs(rng: np.random.Generator, logits: Any, num_logprobs: int) -> None:
    logits[2, 50:] = -np.inf
    token_ids = rng.integers(0, 50, 5).astype(np.int32)
    ours, expected = both("logprobs", logits, token_ids, num_logprobs=num_logprobs)
    for index, (mine, theirs) in enumerate(zip(ours, expected, strict=True)):
        assert mine.shape == tuple(theirs.shape)
        if index != 2:  # ids of equal values (here -inf) may come in any order
            np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-5, atol=1e-6)
    top = ours[2]
    np.testing.assert_array_equal(np.take_along_axis(logits, top.astype(np.int64), -1).argsort(-1)[:, :0], top[:, :0])
    for row in range(5):
        finite = np.isfinite(ours[3][row])
        np.testing.assert_array_equal(top[row][finite], expected[2][row].numpy()[finite])


@pytest.mark.parametrize("with_filters", [False, True])
def test_sample_draws_the_same_tokens(rng: np.random.Generator, with_filters: bool) -> None:
    rows = 40
    logits = (rng.standard_normal((rows, VOCAB)) * 3).astype(np.float32)
    seeds = rng.integers(-(2**31), 2**31, rows, dtype=np.int64).astype(np.int32)
    positions = np.arange(rows, dtype=np.int32)
    temperature = rng.choice([0.0, 0.7, 1.3], rows).astype(np.float32)
    filters: list[Any] = [None, None, None]
    if with_filters:
        filters = [
            rng.choice([0, 1, 7], rows).astype(np.int32),
            rng.uniform(0.3, 1, rows).astype(np.float32),
            rng.uniform(0, 0.2, rows).astype(np.float32),
        ]
    ours, expected = both("sample", logits, seeds, positions, temperature, *filters)
    np.testing.assert_array_equal(ours, expected.numpy())
    ours, expected = both("sample", logits, seeds, positions, None, None, None, None)
    np.testing.assert_array_equal(ours, expected.numpy())
