"""Ops over the rows of whole requests in JAX: attention in both directions, means and windows of rows.

A request is told from its neighbours by a mask, so that shapes are those of the batch alone.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import jax
import jax.numpy as jnp

from ...stages import Array
from ._arrays import compiled, drop_negative, precision, widen
from .attention import distance_buckets

TILE_TOKENS = 128
"""Queries that meet all keys of the batch at a time: scores take [num_heads, TILE_TOKENS, num_tokens] float32."""


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
            half = relative_bias.shape[0] // 2
            bias = widen(relative_bias)[distance_buckets(jnp.abs(distance), half) + (distance > 0) * half]
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


@compiled()
def stack_rows(x: Array, indices: Array) -> Array:
    """Windows of rows side by side; rows of a negative index are zeros."""
    rows = jnp.where(indices[..., None] < 0, 0, jnp.take(x, indices, axis=0, mode="clip"))
    return rows.astype(x.dtype).reshape(indices.shape[0], indices.shape[1] * x.shape[1])


@compiled()
def store_rows(cache: Array, rows: Array, slots: Array) -> Array:
    """The cache with rows at their slots; gives a new one."""
    return cache.at[drop_negative(slots, cache.shape[0])].set(rows.astype(cache.dtype), mode="drop")


@compiled("add")
def place_rows(x: Array, rows: Array, indices: Array, *, add: bool = False) -> Array:
    """x with rows put in the place of its own, or added to them."""
    picked = jnp.take(rows, indices, axis=0, mode="clip").astype(x.dtype)
    return jnp.where((indices >= 0)[:, None], x + picked if add else picked, x)


FUNCTIONS = (encoder_attention, mean_rows, stack_rows, store_rows, place_rows)
