"""Sampling against its definition in core/ops, in float64 and, where torch is installed, against the op itself."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

ops = pytest.importorskip("headrace.kernels.cpu._ops", reason="the kernels are not built: pip install -e .")

Array = npt.NDArray[Any]


def mix(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def noise(seed: int, position: int, token: int) -> float:
    """The docstring of core.ops.sampling.gumbel_noise, in Python integers and float64."""
    key = mix(mix(seed & 0xFFFFFFFF) ^ (position & 0xFFFFFFFF))
    h = mix((key + 0x9E3779B9 * (token + 1)) & 0xFFFFFFFF)
    v = min(float(np.float32((h + 0.5) / 2**32)), 1 - 2**-24)
    return -math.log(-math.log1p(-v))


def draw(logits: Array, seed: int, position: int, temperature: float, k: int, p: float, min_p: float) -> int:
    """One row of core.ops.sampling.sample."""
    if temperature < 1e-5:
        return int(logits.argmax())
    scaled = logits.astype(np.float64) / temperature
    keep = np.ones(len(scaled), bool)
    if min_p > 0:
        keep &= scaled >= scaled.max() + math.log(min_p)
    order = sorted(np.flatnonzero(keep), key=lambda t: (-scaled[t], t))
    if k > 0:
        floor = scaled[order[min(k, len(order)) - 1]]
        order = [t for t in order if scaled[t] >= floor]
    if p < 1:
        weights = np.exp(scaled[order] - scaled[order[0]])
        weights /= weights.sum()
        above = np.cumsum(weights) - weights
        order = [t for i, t in enumerate(order) if i == 0 or above[i] < p]
    return int(max(order, key=lambda t: (scaled[t] + noise(seed, position, int(t)), -t)))


def run(logits: Array, seeds: Array, positions: Array, **options: Array) -> Array:
    out = np.full(len(logits), -7, np.int32)
    ops.sample(out, logits, seeds, positions, **options)
    return out


@pytest.mark.parametrize(
    ("seed", "position", "token"), [(0, 0, 0), (1, 2, 3), (-5, 7, 151935), (2**31 - 1, 40000, 1)]
)
def test_noise(seed: int, position: int, token: int) -> None:
    assert ops.gumbel_noise(seed, position, token) == pytest.approx(noise(seed, position, token), rel=1e-5, abs=1e-6)


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = np.zeros((3, 100), np.float32)
    logits[1, [40, 70]] = 2
    logits[2] = -np.inf
    logits[2, 99] = -3
    zeros = np.zeros(3, np.int32)
    assert run(logits, zeros, zeros).tolist() == [0, 40, 99]
    assert run(logits, zeros, zeros, temperature=np.zeros(3, np.float32)).tolist() == [0, 40, 99]


@pytest.mark.parametrize(
    ("k", "p", "min_p"),
    [(0, 1.0, 0.0), (1, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.5, 0.0), (0, 0.0, 0.0), (40, 0.9, 0.02), (10**6, 0.999, 0)],
)
def test_against_the_definition(k: int, p: float, min_p: float) -> None:
    random = np.random.default_rng((k, int(100 * p)))
    rows, vocab_size = 24, 700
    logits = (random.standard_normal((rows, vocab_size)) * 3).astype(np.float32)
    seeds = random.integers(-(2**31), 2**31, rows).astype(np.int32)
    positions = random.integers(0, 50000, rows).astype(np.int32)
    temperature = random.choice([0, 0.3, 1.0, 1.7], rows).astype(np.float32)
    actual = run(
        logits,
        seeds,
        positions,
        temperature=temperature,
        top_k=np.full(rows, k, np.int32),
        top_p=np.full(rows, p, np.float32),
        min_p=np.full(rows, min_p, np.float32),
    )
    expected = [
        draw(logits[r], int(seeds[r]), int(positions[r]), float(temperature[r]), k, p, min_p) for r in range(rows)
    ]
    assert actual.tolist() == expected


def test_ties_with_the_kth_are_kept() -> None:
    logits = np.zeros((200, 6), np.float32)
    logits[:, 5] = -50
    seeds = np.arange(200, dtype=np.int32)
    tokens = run(
        logits,
        seeds,
        np.zeros(200, np.int32),
        temperature=np.ones(200, np.float32),
        top_k=np.full(200, 2, np.int32),
    )
    assert set(tokens.tolist()) == {0, 1, 2, 3, 4}


def test_frequencies_follow_the_softmax() -> None:
    rows = 20000
    logits = np.tile(np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32)), (rows, 1))
    positions = np.arange(rows, dtype=np.int32)
    tokens = run(logits, np.full(rows, 3, np.int32), positions, temperature=np.ones(rows, np.float32))
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / rows, [0.5, 0.3, 0.15, 0.05], atol=0.012)


def test_a_row_draws_the_same_in_any_batch() -> None:
    random = np.random.default_rng(0)
    logits = random.standard_normal((9, 5000)).astype(np.float32)
    seeds, positions = (random.integers(0, 1000, 9).astype(np.int32) for _ in range(2))
    options: dict[str, Array] = {"temperature": np.full(9, 0.8, np.float32), "top_p": np.full(9, 0.9, np.float32)}
    together = run(logits, seeds, positions, **options)
    for r in range(9):
        row = slice(r, r + 1)
        alone = run(logits[row], seeds[row], positions[row], **{name: a[row] for name, a in options.items()})
        assert alone[0] == together[r]


def test_against_the_op() -> None:
    torch = pytest.importorskip("torch")
    from headrace.core.ops.sampling import sample

    torch.set_num_threads(1)
    random = np.random.default_rng(1)
    logits = (random.standard_normal((16, 3000)) * 2).astype(np.float32)
    seeds, positions = (random.integers(0, 2**31, 16).astype(np.int32) for _ in range(2))
    options: dict[str, Array] = {
        "temperature": np.full(16, 0.7, np.float32),
        "top_k": np.full(16, 50, np.int32),
        "top_p": np.full(16, 0.95, np.float32),
        "min_p": np.full(16, 0.01, np.float32),
    }
    tensors = {name: torch.from_numpy(a) for name, a in options.items()}
    expected = sample(torch.from_numpy(logits), torch.from_numpy(seeds), torch.from_numpy(positions), **tensors)
    assert run(logits, seeds, positions, **options).tolist() == expected.tolist()


def test_errors() -> None:
    logits, ints = np.zeros((2, 5), np.float32), np.zeros(2, np.int32)
    with pytest.raises(ValueError, match=r"top_k must have shape \[2\], got \[3\]"):
        run(logits, ints, ints, top_k=np.zeros(3, np.int32))
    with pytest.raises(ValueError, match="at least one token"):
        run(np.zeros((2, 0), np.float32), ints, ints)
