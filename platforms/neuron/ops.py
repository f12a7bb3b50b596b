"""Ops of Neuron cores that differ from JAX's plain ones: trn2's compiler has no sort (NCC_EVRF029)."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from headrace.core.ops.jax._arrays import compiled
from headrace.core.ops.jax.sampling import draw
from headrace.core.platform import OpProvider
from headrace.core.stages import Array


def provider() -> OpProvider:
    """Sampling without a sort."""
    return OpProvider(name="without-sort", priority=60, ops={"sample": sample})


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
    """As the definition; of equal tokens at top_p's border those of lower ids are kept."""
    return draw(logits, seeds, positions, temperature, top_k, top_p, min_p, dropped=dropped)


def dropped(scaled: Array, top_k: Array | None, top_p: Array | None) -> Array:
    """bool [num_rows, vocab_size]: tokens that top_k and top_p leave out, by halving the range of what the last token
    that they keep may be."""
    drop = jnp.zeros(scaled.shape, bool)
    if top_k is not None:
        ranks = _ranks(scaled)
        kth = _largest(lambda least: (ranks >= least).sum(-1) >= top_k, len(scaled))
        drop = (ranks < kth[:, None]) & (top_k > 0)[:, None]
        scaled = jnp.where(drop, -jnp.inf, scaled)
    if top_p is not None:
        ranks, probability = _ranks(scaled), jax.nn.softmax(scaled, axis=-1)

        def mass(kept: Array) -> Any:
            return jnp.where(kept, probability, 0).sum(-1)

        last = _largest(lambda least: mass(ranks >= least) >= top_p, len(scaled))[:, None]
        above, equal = mass(ranks > last)[:, None], ranks == last
        before = above + jnp.cumsum(jnp.where(equal, probability, 0), -1) - probability
        late = (ranks < last) | (equal & (before >= top_p[:, None]))
        is_best = jnp.arange(scaled.shape[-1]) == scaled.argmax(-1)[:, None]
        drop = drop | (late & (top_p < 1)[:, None] & ~is_best)
    return drop


def _ranks(x: Array) -> Any:
    """Whole numbers, uint32, in the order of float32 ones."""
    bits = jax.lax.bitcast_convert_type(x + 0.0, jnp.uint32)  # -0.0 + 0.0 is 0.0
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def _largest(holds: Callable[[Any], Any], num_rows: int) -> Any:
    """For each row the largest uint32 for which `holds`, [num_rows, 1] -> bool [num_rows], which holds for all below
    it; 0 if it holds for none."""
    found = jnp.zeros((num_rows,), jnp.uint32)
    for bit in range(31, -1, -1):
        tried = found | jnp.uint32(1 << bit)
        found = jnp.where(holds(tried[:, None]), tried, found)
    return found
