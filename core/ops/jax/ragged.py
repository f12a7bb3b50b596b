"""Ops over the rows of whole requests in JAX: attention in both directions, means of rows.

A request is told from its neighbours by a mask, so that shapes are those of the batch alone.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import math

import jax
import jax.numpy as jnp
import numpy as np

from ...stages import Array
from ._arrays import compiled, precision, widen

TILE_TOKENS = 128
"""Queries that meet all keys of the batch at a time: scores take [num_heads, TILE_TOKENS, num_tokens] float32."""
_FARTHEST = 128


@compiled("scale", "window", "softcap", "max_query_len")
def encoder_attention(
    query: Array,
    key: Array,
    value: Array,
    query_start_loc: Array,
    relative_bias: Array | None = None,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    max_query_len: int = 0,
) -> Array:
    """[num_tokens, num_heads, head_dim]; tokens behind the last request see each other."""
    num_tokens, num_heads, head_dim = query.shape
    if not num_tokens:
        return query
    num_kv_heads, exact = key.shape[1], precision(query)
    tile = min(TILE_TOKENS, num_tokens)
    places = jnp.arange(num_tokens, dtype=jnp.int32)
    owners = jnp.searchsorted(query_start_loc[1:], places, side="right").astype(jnp.int32)
    padding = -num_tokens % tile
    tiles = jnp.pad(query, ((0, padding), (0, 0), (0, 0))).reshape(
        -1, tile, num_kv_heads, num_heads // num_kv_heads, head_dim
    )
    tile_places = jnp.arange(num_tokens + padding, dtype=jnp.int32).reshape(-1, tile)
    tile_owners = jnp.pad(owners, (0, padding), constant_values=-1).reshape(-1, tile)

    def attend(arrays: tuple[Array, Array, Array]) -> Array:
        queries, q_places, q_owners = arrays
        scores = jnp.einsum("qhgd,khd->hgqk", queries, key, precision=exact, preferred_element_type=jnp.float32)
        scores = scores * scale
        if softcap:
            scores = softcap * jnp.tanh(scores / softcap)
        distance = places[None, :] - q_places[:, None]
        if relative_bias is not None:
            bias = widen(relative_bias)[_distance_buckets(distance, relative_bias.shape[0])]
            scores = scores + bias.transpose(2, 0, 1).reshape(num_kv_heads, -1, *distance.shape)
        seen = owners[None, :] == q_owners[:, None]
        if window:
            seen = seen & (jnp.abs(distance) < window)
        top = jnp.where(seen, scores, -jnp.inf).max(-1, keepdims=True)
        weights = jnp.where(seen, jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0)), 0)
        total = weights.sum(-1, keepdims=True)
        weights = weights / jnp.where(total == 0, 1, total)
        out = jnp.einsum(
            "hgqk,khd->qhgd",
            weights if exact is not None else weights.astype(value.dtype),
            value,
            precision=exact,
            preferred_element_type=jnp.float32,
        )
        return out.reshape(tile, num_heads, head_dim).astype(query.dtype)

    out = jax.lax.map(attend, (tiles, tile_places, tile_owners))
    return out.reshape(-1, num_heads, head_dim)[:num_tokens]


@compiled()
def mean_rows(x: Array, starts: Array, ends: Array) -> Array:
    """[num_tokens, n] -> [m, n]: row i is the mean of x[starts[i] : ends[i]]."""
    rows = jnp.arange(x.shape[0])
    inside = (rows >= starts[:, None]) & (rows < ends[:, None])
    sums = jnp.dot(inside.astype(jnp.float32), widen(x), precision=jax.lax.Precision.HIGHEST)
    return (sums / jnp.maximum(ends - starts, 1)[:, None]).astype(x.dtype)


def _distance_buckets(distances: Array, num_buckets: int) -> Array:
    """As the definition's; the few distances that differ come from a table."""
    half = num_buckets // 2
    exact = half // 2
    sizes = np.arange(_FARTHEST + 1)
    steps = np.log(np.maximum(sizes, 1).astype(np.float32) / exact) / math.log(_FARTHEST / exact) * (half - exact)
    table = np.where(sizes < exact, sizes, np.minimum(exact + steps.astype(np.int32), half - 1)).astype(np.int32)
    rows = jnp.asarray(table)[jnp.minimum(jnp.abs(distances), _FARTHEST)]
    return rows + (distances > 0) * half


FUNCTIONS = (encoder_attention, mean_rows)
