"""Values of parameters that no checkpoint has, or that are made of what it has."""

import math

import numpy as np
import numpy.typing as npt

from ..ops.attention import MAX_DISTANCE
from .spec import AttentionSpec, MixerSpec, ModelSpec

FloatArray = npt.NDArray[np.float32]


def filled(shape: tuple[int, ...], value: float) -> FloatArray:
    """An array of one value."""
    return np.full(shape, value, np.float32)


def rows_of(values: tuple[int, ...], size: int) -> FloatArray:
    """[len(values), size], each row of one value."""
    return np.repeat(np.asarray(values, np.float32)[:, None], size, axis=1)


def alibi_slopes(attn: AttentionSpec) -> FloatArray:
    """Slopes of linear position biases, [num_heads]; a number of heads that is no power of 2 takes every other
    slope of the next power (Press et al. 2021)."""
    num_slopes = 2 ** math.ceil(math.log2(attn.num_heads))
    exponents = np.arange(1, num_slopes + 1, dtype=np.float64) * (attn.alibi_max_bias / num_slopes)
    slopes = np.exp2(-exponents)
    if num_slopes != attn.num_heads:
        slopes = np.concatenate([slopes[1::2], slopes[::2]])[: attn.num_heads]
    return np.asarray(slopes * attn.alibi_scale, dtype=np.float32)


def sinusoids(spec: ModelSpec, size: int) -> FloatArray:
    """The position embedding of a spec that has no learned one, [num_learned_positions, size]."""
    half = size // 2
    last = half - 1 if spec.sinusoids == "halves" else half
    frequencies = np.exp(np.arange(half) * -(math.log(10000) / last))
    angles = np.arange(spec.first_position, spec.first_position + spec.num_learned_positions)[:, None] * frequencies
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def padding_marks(num_heads: int) -> FloatArray:
    """What stands behind each head of a query, [2, num_heads * 8]: nothing, or what keeps padding from padding, whose
    keys have its negative. Half-precision types hold it and its square."""
    marks = np.zeros((2, num_heads, 8), np.float32)
    marks[1, :, 0] = 128.0
    return marks.reshape(2, -1)


def minus_factor(start: float, size: int, *vectors: FloatArray) -> FloatArray:
    """The factor of differential attention, negative, [size]: of the products of two pairs of learned vectors."""
    q1, k1, q2, k2 = vectors
    return filled((size,), -float(np.exp(q1 @ k1) - np.exp(q2 @ k2) + start))


def pick_rows(rows: tuple[int, ...], table: FloatArray) -> FloatArray:
    """Some rows of a table."""
    return np.asarray(table[list(rows)], np.float32)


def distance_rows(num_buckets: int, farthest: int, *, both_ways: bool) -> tuple[int, ...]:
    """Where T5's buckets end at a distance below MAX_DISTANCE: the bucket of each of so many that ops keep every
    distance up to there apart. both_ways: half of the buckets are for what comes behind."""
    num = num_buckets // 2 if both_ways else num_buckets
    exact, last = num // 2, MAX_DISTANCE - 1
    sizes = np.arange(2 * last)
    steps = np.log(np.maximum(sizes, 1, dtype=np.float32) / exact) / math.log(farthest / exact) * (num - exact)
    rows = np.where(sizes < exact, sizes, np.minimum(exact + steps.astype(np.int64), num - 1))
    return tuple(map(int, np.concatenate([rows, rows + num]) if both_ways else rows))


def add_first(rows: FloatArray, others: FloatArray) -> FloatArray:
    """Rows with the first of other ones added to each."""
    return np.asarray(rows + others[0], np.float32)


def log_rate(rate: FloatArray) -> FloatArray:
    """Logarithms of the fastest decays of a real-gated linear recurrent unit, 8 * softplus(rate)."""
    return np.asarray(np.log(8 * np.logaddexp(0, rate)), np.float32)


def lightning_rates(mixer: MixerSpec) -> FloatArray:
    """Logarithms of the rates at which the heads of lightning attention forget, [num_heads]."""
    slopes = np.arange(1, mixer.num_heads + 1) * (8 * math.log(2) / mixer.num_heads)
    return np.asarray(np.log(mixer.slope_scale) - slopes, np.float32)


def shift_by_one(size: int) -> FloatArray:
    """A convolution that gives what the token before had, [size, 1, 2]."""
    weight = np.zeros((size, 1, 2), np.float32)
    weight[..., 0] = 1
    return weight
