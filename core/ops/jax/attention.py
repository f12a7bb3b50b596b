"""Paged attention in JAX. One family: the ops share the layout of the KV cache.

The cache of a layer is one array [num_blocks, num_kv_heads, block_size, 2 * head_dim] that holds a token's key and
value side by side: registers of a matrix unit are 128 values wide, which 2 * head_dim fills and head_dim often
does not. A cache of integers has such an array of codes, and their scales beside it.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...stages import Array
from ..attention import MAX_DISTANCE, first_seen
from ._arrays import DTYPES, compiled, drop_negative, precision

KV_HEADS_AXIS = 1
"""The axis of a cache that tensor parallelism cuts."""
TILE_TOKENS = 16
"""Query tokens of one request that are computed together, unless every request has one."""
SPAN_TOKENS = 128
"""Keys that one step of the loop over the cache reads."""
_NEVER = -1e30
"""A score that no weight is left of; not -inf, of which a difference would be NaN."""


class Integers(NamedTuple):
    """A cache of integers, as core/ops/attention.py's: codes times scales.

    codes: int8 [num_blocks, num_kv_heads, block_size, 2 * head_dim]. scales: float32 [num_blocks, num_kv_heads,
    2 * block_size], those of a block's keys, then those of its values.
    """

    codes: Array
    scales: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the codes."""
        shape: tuple[int, ...] = self.codes.shape
        return shape

    def write(self, key: Array, value: Array, block_ids: Array, offsets: Array) -> "Integers":
        """With key and value, [num_tokens, num_kv_heads, head_dim], stored at these places."""
        (key_codes, key_scales), (value_codes, value_scales) = to_integers(key), to_integers(value)
        both, block_size = jnp.concatenate([key_codes, value_codes], -1), self.codes.shape[2]
        return Integers(
            codes=self.codes.at[block_ids, :, offsets].set(both, mode="drop"),
            scales=self.scales.at[block_ids, :, offsets]
            .set(key_scales, mode="drop")
            .at[block_ids, :, offsets + block_size]
            .set(value_scales, mode="drop"),
        )

    def take(self, ids: Array) -> Array:
        """What blocks hold, float32 [*ids.shape, num_kv_heads, block_size, 2 * head_dim]."""
        codes, scales = (jnp.take(part, ids, axis=0, mode="clip") for part in self)
        scales = scales.reshape(*scales.shape[:-1], 2, -1).swapaxes(-1, -2)
        return codes.astype(jnp.float32) * jnp.repeat(scales, codes.shape[-1] // 2, -1)


def to_integers(x: Array) -> tuple[Array, Array]:
    """Rows [..., head_dim] as int8 codes of their shape and float32 scales [...]; the scale of a row that is not
    finite is NaN."""
    x = x.astype(jnp.float32)
    top = jnp.abs(x).max(-1)
    inverse = jnp.where(top > 0, 127 / top, 0)
    codes = jnp.nan_to_num(jnp.round(x * inverse[..., None]), nan=0.0, posinf=0.0, neginf=0.0)
    return codes.astype(jnp.int8), jnp.where(jnp.isfinite(top), top / 127, jnp.nan)


def new_kv_cache(
    *, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: str, device: Any
) -> Array:
    """The KV cache of one layer, zeroed. device: a JAX device or sharding."""
    if dtype == "int8":
        return Integers(
            codes=jnp.zeros((num_blocks, num_kv_heads, block_size, 2 * head_dim), jnp.int8, device=device),
            scales=jnp.zeros((num_blocks, num_kv_heads, 2 * block_size), jnp.float32, device=device),
        )
    return jnp.zeros((num_blocks, num_kv_heads, block_size, 2 * head_dim), DTYPES[dtype], device=device)


@compiled()
def write_kv(kv_cache: Array, key: Array, value: Array, slot_mapping: Array) -> Array:
    """The cache with this step's keys and values; a slot of -1 is stored nowhere."""
    num_blocks, _, block_size, _ = kv_cache.shape
    block_ids = drop_negative(slot_mapping, num_blocks * block_size) // block_size
    if isinstance(kv_cache, Integers):
        return kv_cache.write(key, value, block_ids, slot_mapping % block_size)
    both = jnp.concatenate([key, value], -1).astype(kv_cache.dtype)
    # Heads are a slice, not an index: each device stores its own.
    return kv_cache.at[block_ids, :, slot_mapping % block_size].set(both, mode="drop")


@compiled("scale", "window", "chunk", "softcap", "causal", "max_query_len", "max_seq_len")
def paged_attention(
    query: Array,
    kv_cache: Array,
    query_start_loc: Array,
    seq_lens: Array,
    block_table: Array,
    *,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    relative_bias: Array | None = None,
    reach: Array | None = None,
    causal: bool = True,
    max_query_len: int = 0,
    max_seq_len: int = 0,
) -> Array:
    """Attention of a ragged batch, tile by tile over the queries and span by span over the cache.

    A span begins at a multiple of its length wherever a request's last token is, so that a request's sums are
    formed in one order in any batch. Only max_query_len of 1 or of something else makes a difference here.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv_cache.shape[1:3]
    group = num_heads // num_kv_heads
    if not num_tokens:
        return query
    tile_tokens = 1 if max_query_len == 1 else TILE_TOKENS
    tiles = query_tiles(query_start_loc, seq_lens, num_tokens, tile_tokens, window, chunk)
    if not causal:
        whole = jnp.where(tiles.ends > 0, seq_lens[tiles.requests], 0)
        tiles = tiles._replace(ends=whole, first_keys=jnp.zeros_like(whole))
    ahead = None
    if causal and reach is not None and max_query_len != 1:  # nothing stands behind the last token
        own_lens = seq_lens[tiles.requests]
        ahead = jnp.where(tiles.positions < own_lens[:, None], reach[tiles.tokens], 0)  # [num_tiles, tile_tokens]
        furthest = jnp.minimum(ahead.max(1), own_lens)
        tiles = tiles._replace(ends=jnp.where(tiles.ends > 0, jnp.maximum(tiles.ends, furthest), 0))
    num_tiles, tile_tokens = tiles.positions.shape
    tiled = query[tiles.tokens].reshape(num_tiles, tile_tokens, num_kv_heads, group, head_dim)

    blocks = max(1, SPAN_TOKENS // block_size)
    span = blocks * block_size
    padding = -block_table.shape[1] % blocks
    table = jnp.pad(block_table, ((0, 0), (0, padding)), constant_values=-1)[tiles.requests]
    exact = precision(query)
    slopes = None if alibi_slopes is None else alibi_slopes.reshape(1, num_kv_heads, group, 1, 1)

    def add_span(index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, out = state
        ids = jax.lax.dynamic_slice_in_dim(table, index * blocks, blocks, 1)
        if isinstance(kv_cache, Integers):
            kv = kv_cache.take(ids).astype(query.dtype)
        else:
            kv = jnp.take(kv_cache, ids, axis=0, mode="clip")  # [num_tiles, blocks, num_kv_heads, block_size, 2 * d]
        kv = kv.swapaxes(1, 2).reshape(num_tiles, num_kv_heads, span, 2 * head_dim)
        places = index * span + jnp.arange(span)
        # What no query of the tile sees may hold anything, NaN too, and 0 * NaN is NaN.
        alive = (places >= tiles.first_keys[:, None]) & (places < tiles.ends[:, None])
        kv = jnp.where(alive[:, None, :, None], kv, 0)
        scores = jnp.einsum(
            "nqhgd,nhkd->nhgqk",
            tiled,
            kv[..., :head_dim],
            precision=exact,
            preferred_element_type=jnp.float32,
        )
        scores = scores * scale
        if softcap:
            scores = softcap * jnp.tanh(scores / softcap)
        distance = places[None, None] - tiles.positions[:, :, None]  # [num_tiles, tile_tokens, span]
        if slopes is not None:
            scores = scores + slopes * distance[:, None, None]
        if relative_bias is not None:
            rows = distance_buckets(-distance, relative_bias.shape[0])
            bias = relative_bias[rows].transpose(0, 3, 1, 2)  # [num_tiles, num_heads, tile_tokens, span]
            scores = scores + bias.reshape(num_tiles, num_kv_heads, group, tile_tokens, span)
        seen = jnp.broadcast_to(alive[:, None], distance.shape)
        if causal:
            before = distance <= 0
            seen = seen & (before if ahead is None else before | (places < ahead[..., None]))
        if window or chunk:
            seen = seen & (places >= first_seen(tiles.positions, window, chunk)[:, :, None])
        seen = seen[:, None, None]
        new_top = jnp.maximum(top, jnp.where(seen, scores, _NEVER).max(-1))
        weights = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0)
        fade = jnp.exp(top - new_top)
        values = kv[..., head_dim:]
        part = jnp.einsum(
            "nhgqk,nhkd->nhgqd",
            weights if exact is not None else weights.astype(values.dtype),
            values,
            precision=exact,
            preferred_element_type=jnp.float32,
        )
        return new_top, total * fade + weights.sum(-1), out * fade[..., None] + part

    shape = (num_tiles, num_kv_heads, group, tile_tokens)
    if sinks is None:
        top, total = jnp.full(shape, _NEVER, jnp.float32), jnp.zeros(shape, jnp.float32)
    else:
        top = jnp.broadcast_to(sinks.reshape(1, num_kv_heads, group, 1).astype(jnp.float32), shape)
        total = jnp.ones(shape, jnp.float32)
    state = (top, total, jnp.zeros((*shape, head_dim), jnp.float32))
    first = jnp.min(jnp.where(tiles.ends > 0, tiles.first_keys, jnp.iinfo(jnp.int32).max)) // span
    _, total, out = jax.lax.fori_loop(first, -(-jnp.max(tiles.ends) // span), add_span, state)
    out = out / jnp.where(total == 0, 1, total)[..., None]
    out = out.transpose(0, 3, 1, 2, 4).reshape(num_tiles * tile_tokens, num_heads, head_dim)
    return out[tiles.places].astype(query.dtype)


def distance_buckets(distances: Array, num_buckets: int) -> Array:
    """Rows of a bias by distance, as the definition computes them."""
    exact, size = num_buckets // 2, jnp.maximum(distances, 0)
    growth = jnp.log(jnp.maximum(size, 1).astype(jnp.float32) / exact) / math.log(MAX_DISTANCE / exact)
    steps = exact + (growth * (num_buckets - exact)).astype(jnp.int32)
    return jnp.where(size < exact, size, jnp.minimum(steps, num_buckets - 1))


class QueryTiles(NamedTuple):
    """The queries of a step in tiles of one request each; how many there are never depends on a value.

    tokens: [num_tiles, tile_tokens] index into the step's tokens (any, where a tile is not full). positions: the
    same shape, of each token in its request. requests: [num_tiles]. first_keys, ends: [num_tiles], the positions
    [first_key, end) that some query of the tile sees; (0, 0) for a tile that is not used. places: [num_tokens], of
    each token among all tiles' tokens.
    """

    tokens: Array
    positions: Array
    requests: Array
    first_keys: Array
    ends: Array
    places: Array


def query_tiles(
    query_start_loc: Array, seq_lens: Array, num_tokens: int, tile_tokens: int, window: int, chunk: int
) -> QueryTiles:
    """Cut the tokens of each request into tiles of `tile_tokens`."""
    num_reqs = seq_lens.shape[0]
    tile_tokens = min(tile_tokens, num_tokens)
    num_tiles = min(num_tokens, num_tokens // tile_tokens + num_reqs)
    starts, counts = query_start_loc[:-1], jnp.diff(query_start_loc)
    tiles_of = -(-counts // tile_tokens)
    tile_ends = jnp.cumsum(tiles_of)
    numbers = jnp.arange(num_tiles, dtype=jnp.int32)
    requests = jnp.minimum(jnp.searchsorted(tile_ends, numbers, side="right"), num_reqs - 1).astype(jnp.int32)
    begins = (numbers - (tile_ends - tiles_of)[requests]) * tile_tokens  # within the request's tokens of this step
    is_used = numbers < tile_ends[-1]
    offsets = begins[:, None] + jnp.arange(tile_tokens, dtype=jnp.int32)
    before = (seq_lens - counts)[requests]
    last = jnp.minimum(begins + tile_tokens, counts[requests]) - 1
    ends = jnp.where(is_used, before + last + 1, 0)
    first_keys = jnp.maximum(first_seen(before + begins, window, chunk), 0)
    owners = jnp.searchsorted(query_start_loc[1:], jnp.arange(num_tokens), side="right")
    owners = jnp.minimum(owners, num_reqs - 1)
    inside = jnp.arange(num_tokens, dtype=jnp.int32) - starts[owners]
    places = ((tile_ends - tiles_of)[owners] + inside // tile_tokens) * tile_tokens + inside % tile_tokens
    return QueryTiles(
        tokens=jnp.clip(starts[requests][:, None] + offsets, 0, num_tokens - 1),
        positions=before[:, None] + offsets,
        requests=requests,
        first_keys=jnp.where(is_used, first_keys, 0),
        ends=ends,
        places=jnp.clip(places, 0, num_tiles * tile_tokens - 1),
    )


FUNCTIONS = (new_kv_cache, write_kv, paged_attention)
