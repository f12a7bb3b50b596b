"""The definitions in core/ops/sampling.py against transformers' warpers, float64 numpy and a hash in plain Python."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headrace.core.ops import sampling as ops

VOCAB = 1000
Float64 = npt.NDArray[np.float64]


def make_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def floats(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


# ---- noise ------------------------------------------------------------------------------------------------
def hash_oracle(seed: int, position: int, token: int) -> float:
    """The noise as its definition says, one number at a time, in Python's integers and float64."""

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ (x >> 16)

    key = mix(mix(seed % 2**32) ^ position % 2**32)
    h = mix((key + 0x9E3779B9 * (token + 1)) % 2**32)
    v = min(float(np.float32((h + 0.5) / 2**32)), 1 - 2**-24)
    return -math.log(-math.log1p(-v))


@given(st.integers(-(2**31), 2**31 - 1), st.integers(0, 2**31 - 1))
def test_noise_is_the_hash(seed: int, position: int) -> None:
    noise = ops.gumbel_noise(ints([seed]), ints([position]), vocab_size=7)[0]
    expected = [hash_oracle(seed, position, token) for token in range(7)]
    np.testing.assert_allclose(noise.numpy(), expected, rtol=2e-6, atol=2e-6)


def test_noise_is_finite_and_gumbel() -> None:
    noise = ops.gumbel_noise(ints(range(20)), ints(range(20)), vocab_size=20_000).double().flatten()
    assert noise.isfinite().all()
    # Kolmogorov-Smirnov against exp(-exp(-x)); 1.95 / sqrt(n) is the 0.1 % point.
    ordered = noise.sort().values
    expected = torch.exp(-torch.exp(-ordered))
    steps = torch.arange(1, len(ordered) + 1) / len(ordered)
    assert (expected - steps).abs().max() < 1.95 / math.sqrt(len(ordered))


# ---- filters ----------------------------------------------------------------------------------------------
def kept_by(logits: torch.Tensor, *warpers: LogitsProcessor) -> torch.Tensor:
    """Which tokens transformers' warpers keep."""
    ids: Any = torch.zeros(logits.shape[0], 1, dtype=torch.long)
    for warper in warpers:
        logits = warper(ids, logits)
    return logits.isfinite()


def sampled_tokens(logits: torch.Tensor, count: int, **filters: float) -> torch.Tensor:
    """Tokens drawn at `count` positions from each row: [rows, count]."""
    # All positions of a row side by side: noise depends on seed and position alone.
    rows, num_draws = logits.shape[0], logits.shape[0] * count

    def column(name: str, make: Callable[[list[Any]], Any]) -> Any:
        return make([filters[name]] * num_draws) if name in filters else None

    drawn: torch.Tensor = ops.sample(
        logits.repeat_interleave(count, 0),
        ints([row for row in range(rows) for _ in range(count)]),
        ints([*range(count)] * rows),
        floats([filters.get("temperature", 1.0)] * num_draws),
        column("top_k", ints),
        column("top_p", floats),
        column("min_p", floats),
    )
    return drawn.reshape(rows, count).long()


@pytest.mark.parametrize(
    ("filters", "warpers"),
    [
        ({"top_k": 5}, [TopKLogitsWarper(5)]),
        ({"top_k": 5000}, [TopKLogitsWarper(5000)]),
        ({"top_p": 0.5}, [TopPLogitsWarper(0.5)]),
        ({"top_p": 0.01}, [TopPLogitsWarper(0.01)]),
        ({"min_p": 0.3}, [MinPLogitsWarper(0.3)]),
        ({"top_k": 20, "top_p": 0.7}, [TopKLogitsWarper(20), TopPLogitsWarper(0.7)]),
        ({"min_p": 0.1, "top_k": 9}, [MinPLogitsWarper(0.1), TopKLogitsWarper(9)]),
        ({"temperature": 0.4, "top_p": 0.9}, [TemperatureLogitsWarper(0.4), TopPLogitsWarper(0.9)]),
        ({"temperature": 3.0, "min_p": 0.2}, [TemperatureLogitsWarper(3.0), MinPLogitsWarper(0.2)]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_filters_keep_what_transformers_keeps(filters: dict[str, float], warpers: list[LogitsProcessor]) -> None:
    """Every drawn token is kept by transformers, and every kept one of some weight is drawn."""
    logits = make_logits(4, vocab=40)
    kept = kept_by(logits.clone(), *warpers)
    drawn = torch.zeros_like(kept).scatter(1, sampled_tokens(logits, 1500, **filters), True)
    assert not (drawn & ~kept).any()
    scaled = (logits / filters.get("temperature", 1.0)).masked_fill(~kept, float("-inf")).softmax(-1)
    assert not (kept & (scaled > 0.01) & ~drawn).any()


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.7, "top_k": 6}, {"top_p": 0.8}, {"min_p": 0.05}], ids=str)
def test_the_distribution_is_right(filters: dict[str, float]) -> None:
    """Chi-square of 20,000 draws against float64 probabilities; 4.5 standard deviations is one in 100,000."""
    logits = make_logits(1, vocab=12, seed=3) / 2
    count = 20_000
    many = logits.expand(count, -1)
    drawn = ops.sample(
        many,
        ints(range(count)),
        ints([7] * count),
        floats([filters.get("temperature", 1.0)] * count),
        ints([int(filters["top_k"])] * count) if "top_k" in filters else None,
        floats([filters["top_p"]] * count) if "top_p" in filters else None,
        floats([filters["min_p"]] * count) if "min_p" in filters else None,
    )
    probabilities = oracle_probabilities(logits[0].double().numpy(), filters)
    counts = np.bincount(drawn.numpy(), minlength=12)
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities[probabilities > 0] * count
    statistic = float(((counts[probabilities > 0] - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    assert statistic < freedom + 4.5 * math.sqrt(2 * freedom)


def oracle_probabilities(logits: Float64, filters: dict[str, float]) -> Float64:
    """Temperature, min_p, top_k, top_p in float64, by their definitions."""

    def softmax(x: Float64) -> Float64:
        e = np.exp(x - x.max())
        return np.asarray(e / e.sum())

    x = logits / filters.get("temperature", 1.0)
    if "min_p" in filters:
        p = softmax(x)
        x = np.where(p >= filters["min_p"] * p.max(), x, -np.inf)
    if "top_k" in filters:
        x = np.where(x >= np.sort(x)[-int(filters["top_k"])], x, -np.inf)
    if "top_p" in filters:
        p = softmax(x)
        above = np.array([p[p > own].sum() for own in p])
        x = np.where(above < filters["top_p"], x, -np.inf)
    return softmax(x)


def test_ties_with_the_kth_are_kept_and_the_first_wins() -> None:
    logits = floats([[1.0, 2.0, 2.0, 2.0, 0.0]])
    drawn = sampled_tokens(logits, 300, top_k=1)
    assert set(drawn[0].tolist()) == {1, 2, 3}
    assert ops.sample(logits, ints([0]), ints([0]), None, None, None, None).tolist() == [1]
    assert set(sampled_tokens(logits, 300, top_p=0.01)[0].tolist()) == {1}


def test_rows_of_their_own() -> None:
    """Greedy, filtered and free rows side by side are what each is alone, in any order and company."""
    logits = make_logits(6)
    columns = (
        ints([5, 5, 7, 8, -9, 10]),
        ints([0, 1, 2, 3, 4, 5]),
        floats([0.0, 1.0, 0.5, 1.3, 1.0, 2.0]),
        ints([0, 0, 3, 0, 50, 1]),
        floats([1.0, 0.5, 1.0, 1.0, 0.9, 1.0]),
        floats([0.0, 0.0, 0.0, 0.1, 0.0, 0.0]),
    )
    together = ops.sample(logits, *columns)
    for order in ([0], [3], [5, 1], [4, 2, 0, 3], [5, 4, 3, 2, 1, 0]):
        part = ops.sample(logits[order], *(column[order] for column in columns))
        assert part.tolist() == together[order].tolist()
    assert together[0] == logits[0].argmax() and together[5] == logits[5].argmax()


def test_filters_that_keep_all_change_nothing() -> None:
    logits = make_logits(3)
    seeds, positions, temperature = ints([1, 2, 3]), ints([4, 5, 6]), floats([1.0, 0.8, 2.0])
    free = ops.sample(logits, seeds, positions, temperature, None, None, None)
    neutral = ops.sample(
        logits, seeds, positions, temperature, ints([0, VOCAB, 0]), floats([1.0] * 3), floats([0.0] * 3)
    )
    assert free.tolist() == neutral.tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
def test_rows_without_a_number_give_some_token(bad: float) -> None:
    logits = make_logits(2)
    logits[0] = bad
    for temperature in (None, floats([0.0, 1.0]), floats([1.0, 1.0])):
        tokens = ops.sample(
            logits, ints([1, 2]), ints([3, 4]), temperature, ints([5, 5]), floats([0.5, 0.5]), floats([0.1, 0.1])
        )
        assert 0 <= int(tokens[0]) < VOCAB
    ops.logprobs(logits, ints([0, 0]), num_logprobs=3)


# ---- edits ------------------------------------------------------------------------------------------------
@given(st.sets(st.integers(0, 69), min_size=1), st.integers(64, 70))
def test_token_mask(allowed: set[int], vocab: int) -> None:
    logits = make_logits(1, vocab=vocab)
    words = [0] * 3
    for token in allowed:
        words[token // 32] |= 1 << (token % 32)
    mask = torch.from_numpy(np.array([words], np.uint32).view(np.int32))
    expected = [float(x) if i in allowed else float("-inf") for i, x in enumerate(logits[0])]
    assert ops.apply_token_mask(logits, mask)[0].tolist() == expected


def test_logit_bias_adds_up() -> None:
    logits = make_logits(2)
    rows, tokens, values = [0, 1, 1, 1], [3, 4, 4, 5], [1.5, 2.0, -1.0, float("-inf")]
    expected = logits.clone()
    for row, token, value in zip(rows, tokens, values, strict=True):
        expected[row, token] += value
    before = logits.clone()
    assert torch.equal(ops.add_logit_bias(logits, ints(rows), ints(tokens), floats(values)), expected)
    assert torch.equal(logits, before)


def test_repetition_penalty_equals_transformers() -> None:
    logits = make_logits(2)
    used = [[3, 5, 5, 900], [3, 4, 6, 7]]
    ids: Any = torch.tensor(used)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(ids, logits.clone())
    entries = [(row, token) for row in (0, 1) for token in sorted(set(used[row]))]
    rows, tokens = (ints(column) for column in zip(*entries, strict=True))
    neutral = floats([0.0, 0.0])
    ours = ops.apply_penalties(logits, rows, tokens, torch.zeros_like(rows), floats([1.3, 1.3]), neutral, neutral)
    torch.testing.assert_close(ours, expected)


def test_frequency_and_presence_by_their_formula() -> None:
    logits = make_logits(1)
    tokens, counts = [2, 3, 4], [0, 1, 5]
    ours = ops.apply_penalties(
        logits, ints([0] * 3), ints(tokens), ints(counts), floats([1.0]), floats([0.5]), floats([-0.25])
    )
    for token, count in zip(tokens, counts, strict=True):
        expected = float(logits[0, token]) - 0.5 * count + 0.25 * (count > 0)
        assert float(ours[0, token]) == pytest.approx(expected, rel=1e-6)
    untouched = [token for token in range(VOCAB) if token not in tokens]
    assert torch.equal(ours[0, untouched], logits[0, untouched])


def test_logprobs_against_float64() -> None:
    logits = make_logits(3)
    chosen_ids = [5, 0, int(logits[2].argmax())]
    chosen, ranks, top_ids, top_values = ops.logprobs(logits, ints(chosen_ids), num_logprobs=4)
    exact = logits.double().numpy()
    exact = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    for row, token in enumerate(chosen_ids):
        assert float(chosen[row]) == pytest.approx(exact[row, token], abs=1e-5)
        assert int(ranks[row]) == int((exact[row] > exact[row, token]).sum()) + 1
        best = np.argsort(-exact[row])[:4]
        assert top_ids[row].tolist() == best.tolist()
        np.testing.assert_allclose(top_values[row].numpy(), exact[row, best], atol=1e-5)
    assert ops.logprobs(logits, ints(chosen_ids), num_logprobs=0)[2].shape == (3, 0)
