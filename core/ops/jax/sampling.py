"""From logits to tokens in JAX: float32 logits [num_rows, vocab_size], noise bit by bit as the definition's."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...stages import Array
from ._arrays import compiled, drop_negative


@compiled()
def apply_token_mask(logits: Array, mask: Array) -> Array:
    """Ban tokens whose bit is 0."""
    tokens = jnp.arange(logits.shape[-1])
    allowed = (mask[:, tokens // 32] >> (tokens % 32).astype(mask.dtype)) & 1
    return jnp.where(allowed == 0, -jnp.inf, logits)


@compiled()
def add_logit_bias(logits: Array, rows: Array, tokens: Array, values: Array) -> Array:
    """logits[rows[i], tokens[i]] += values[i]; a negative row is padding."""
    return logits.at[drop_negative(rows, logits.shape[0]), tokens].add(values, mode="drop")


@compiled()
def apply_penalties(
    logits: Array,
    rows: Array,
    tokens: Array,
    counts: Array,
    repetition: Array,
    frequency: Array,
    presence: Array,
) -> Array:
    """Repetition, then frequency and presence, for the tokens that a row has used; a negative row is padding."""
    rows = drop_negative(rows, logits.shape[0])
    value = logits.at[rows, tokens].get(mode="clip")
    rep = jnp.take(repetition, rows, mode="clip")
    value = jnp.where(value > 0, value / rep, value * rep)
    value = value - jnp.take(frequency, rows, mode="clip") * counts
    value = value - jnp.take(presence, rows, mode="clip") * (counts > 0)
    return logits.at[rows, tokens].set(value, mode="drop")


@compiled("num_logprobs")
def logprobs(logits: Array, token_ids: Array, *, num_logprobs: int) -> tuple[Array, Array, Array, Array]:
    """Log probabilities of chosen and of most likely tokens."""
    values = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(values, token_ids[:, None], -1)
    ranks = (values > chosen).sum(-1, dtype=jnp.int32) + 1
    top_values, top_ids = jax.lax.top_k(values, num_logprobs)
    return chosen[:, 0], ranks, top_ids.astype(jnp.int32), top_values


@compiled()
def sample(
    logits: Array,
    seeds: Array,
    positions: Array,
    temperature: Array | None,
    top_k: Array | None,
    top_p: Array | None,
    min_p: Array | None,
) -> Array:
    """One token a row: temperature, min_p, top_k, top_p, then the Gumbel maximum."""
    return draw(logits, seeds, positions, temperature, top_k, top_p, min_p, dropped=_dropped)


def draw(
    logits: Array,
    seeds: Array,
    positions: Array,
    temperature: Array | None,
    top_k: Array | None,
    top_p: Array | None,
    min_p: Array | None,
    *,
    dropped: Callable[[Array, Array | None, Array | None], Array],
) -> Array:
    """`sample`; dropped: (logits over temperature, top_k, top_p) -> bool of their shape, tokens that the two leave
    out. Not an op."""
    best = logits.argmax(-1).astype(jnp.int32)
    if temperature is None:
        return best
    scaled = logits / jnp.maximum(temperature, 1e-5)[:, None]
    if min_p is not None:
        floor = scaled.max(-1, keepdims=True) + jnp.log(min_p)[:, None]
        scaled = jnp.where(scaled < floor, -jnp.inf, scaled)
    if top_k is not None or top_p is not None:
        scaled = jnp.where(dropped(scaled, top_k, top_p), -jnp.inf, scaled)
    noisy = scaled + gumbel_noise(seeds, positions, vocab_size=logits.shape[-1])
    return jnp.where(temperature < 1e-5, best, noisy.argmax(-1).astype(jnp.int32))


def gumbel_noise(seeds: Array, positions: Array, *, vocab_size: int) -> Array:
    """Gumbel noise from a counter, float32 [num_rows, vocab_size]: the definition's in 32-bit arithmetic."""
    key = _mix(_mix(_bits(seeds)) ^ _bits(positions))
    tokens = jnp.arange(1, vocab_size + 1, dtype=jnp.uint32)
    h = _mix(key[:, None] + tokens * jnp.uint32(0x9E3779B9))
    v = jnp.minimum(_add_half(h) * jnp.float32(2.0**-32), jnp.float32(1 - 2.0**-24))
    return -jnp.log(-jnp.log1p(-v))


def _dropped(scaled: Array, top_k: Array | None, top_p: Array | None) -> Array:
    """bool [num_rows, vocab_size]: tokens that top_k and top_p leave out."""
    num_rows, vocab_size = scaled.shape
    tokens = jax.lax.broadcasted_iota(jnp.int32, scaled.shape, 1)
    negated, order = jax.lax.sort((-scaled, tokens), num_keys=1, is_stable=True)
    ordered = -negated
    drop = jnp.zeros(scaled.shape, bool)
    if top_k is not None:
        kth = jnp.take_along_axis(ordered, jnp.clip(top_k - 1, 0, vocab_size - 1)[:, None], -1)
        drop = (ordered < kth) & (top_k > 0)[:, None]
        ordered = jnp.where(drop, -jnp.inf, ordered)
    if top_p is not None:
        probability = jax.nn.softmax(ordered, axis=-1)
        above = jnp.cumsum(probability, -1) - probability
        drop = (drop | ((above >= top_p[:, None]) & (top_p < 1)[:, None])).at[:, 0].set(False)
    rows = jnp.arange(num_rows)[:, None]
    return jnp.zeros_like(drop).at[rows, order].set(drop, unique_indices=True)


def _bits(x: Array) -> Any:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _mix(x: Any) -> Any:
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _add_half(h: Any) -> Any:
    """h + 0.5 of uint32 integers, rounded once to float32 as if computed exactly.

    Below 2^24 the sum of floats is rounded once anyway. Above, h has s bits too many for float32, and one half more
    lifts every tie: the bits are rounded half up.
    """
    s = 8 - jnp.minimum(jax.lax.clz(h), 7)
    kept = ((h >> (s - 1)) + 1) >> 1
    large = kept.astype(jnp.float32) * (jnp.uint32(1) << s).astype(jnp.float32)
    return jnp.where(h < 2**24, h.astype(jnp.float32) + 0.5, large)


FUNCTIONS = (apply_token_mask, add_logit_bias, apply_penalties, logprobs, sample)
