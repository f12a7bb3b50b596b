"""Ragged paged attention in Pallas: prefill chunks, decodes and verification in one kernel (Dao et al. 2022's sums).

The grid walks over tiles of queries and, within one, over spans of a few KV blocks. The block table is prefetched as
scalars, so that the pipeline fetches the next blocks while this span is computed. Divisions are lax's, which round to
zero: what rounds down asks for the chip's generation, which is not known ahead of time.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
SPAN_TOKENS = 128
"""Keys that one step of the grid reads."""
MAX_TILE_VALUES = 640 << 10
"""Values of a tile of queries that vector memory has room for, beside its sums and the blocks on their way."""
MAX_TABLE_BYTES = 384 << 10
"""Scalar memory that a block table may take."""
_NEVER = -1e30


def paged_attention(
    query: Any,
    kv_cache: Any,
    block_table: Any,
    requests: Any,
    positions: Any,
    first_keys: Any,
    ends: Any,
    sinks: Any | None,
    slopes: Any | None,
    scales: Any | None = None,
    *,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
    interpret: bool,
) -> Any:
    """Attention of tiles of queries.

    query: [num_tiles, tile_tokens, num_heads, head_dim], each tile of one request with rising positions. kv_cache:
    [num_blocks, num_kv_heads, block_size, 2 * head_dim], key and value side by side. block_table: int32 [num_reqs,
    max_num_blocks], -1 padded. Per tile, int32 [num_tiles]: requests, a row of the table; positions, of its first
    query; first_keys and ends, the positions [first_key, end) that some query of it sees, end 0 for an unused tile.
    sinks, slopes: float32 [num_heads] or None. scales: of a cache of int8, float32 [num_blocks, num_kv_heads,
    2 * block_size], those of a block's keys before those of its values. Returns query's shape and dtype.
    """
    num_tiles, tile_tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv_cache.shape[1:3]
    group = num_heads // num_kv_heads
    rows = group * tile_tokens
    blocks = max(1, SPAN_TOKENS // block_size)
    span = blocks * block_size
    # A slice that does not begin at a register's border is dear. So a narrow head multiplies key and value together:
    # zeros in the query leave out the value, and of the result the key's half is dropped.
    whole = head_dim % LANES != 0
    heads = query.reshape(num_tiles, tile_tokens, num_kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    heads = heads.reshape(num_tiles, num_kv_heads, rows, head_dim)
    if whole:
        heads = jnp.pad(heads, ((0, 0), (0, 0), (0, 0), (0, head_dim)))
    width = heads.shape[-1]

    def per_row(values: Any | None, neutral: float) -> Any:
        """float32 [num_heads] as [num_kv_heads, rows, 1]."""
        filled = jnp.full(num_heads, neutral, jnp.float32) if values is None else values.astype(jnp.float32)
        return jnp.repeat(filled.reshape(num_kv_heads, group), tile_tokens, 1)[..., None]

    def of_tile(n: Any, j: Any, *scalars: Any) -> tuple[Any, ...]:
        return n, 0, 0, 0

    def of_block(i: int, n: Any, j: Any, requests: Any, positions: Any, firsts: Any, ends: Any, table: Any) -> Any:
        last = jax.lax.div(jnp.maximum(ends[n] - 1, 0), block_size)
        index = jnp.minimum((jax.lax.div(firsts[n], span) + j) * blocks + i, last)
        return jnp.maximum(table[requests[n], index], 0), 0, 0, 0

    def of_scales(i: int, *scalars: Any) -> Any:
        return of_block(i, *scalars)[:3]

    def of_heads(n: Any, j: Any, *scalars: Any) -> tuple[Any, ...]:
        return 0, 0, 0

    tile = pl.BlockSpec((1, num_kv_heads, rows, width), of_tile)
    head = pl.BlockSpec((num_kv_heads, rows, 1), of_heads)
    block = (1, num_kv_heads, block_size, 2 * head_dim)
    scale_block = (1, num_kv_heads, 2 * block_size)
    spans = jnp.maximum(jnp.max(-(-ends // span) - first_keys // span), 1)
    body = functools.partial(
        _attend,
        tile_tokens=tile_tokens,
        scale=scale,
        window=window,
        chunk=chunk,
        softcap=softcap,
        has_slopes=slopes is not None,
        num_blocks=blocks,
    )
    out = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(num_tiles, spans),
            in_specs=[
                tile,
                head,
                head,
                *(pl.BlockSpec(block, functools.partial(of_block, i)) for i in range(blocks)),
                *(
                    pl.BlockSpec(scale_block, functools.partial(of_scales, i))
                    for i in range(0 if scales is None else blocks)
                ),
            ],
            out_specs=tile,
            scratch_shapes=[
                pltpu.VMEM((num_kv_heads, rows, 1), jnp.float32),
                pltpu.VMEM((num_kv_heads, rows, 1), jnp.float32),
                pltpu.VMEM((num_kv_heads, rows, width), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(heads.shape, query.dtype),
        interpret=interpret,
    )(
        requests,
        positions,
        first_keys,
        ends,
        block_table,
        heads,
        per_row(sinks, _NEVER),
        per_row(slopes, 0.0),
        *[kv_cache] * blocks,
        *[] if scales is None else [scales] * blocks,
    )
    out = out[..., head_dim:] if whole else out
    out = out.reshape(num_tiles, num_kv_heads, group, tile_tokens, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(query.shape)


def _attend(
    requests: Any,
    positions: Any,
    first_keys: Any,
    ends: Any,
    table: Any,
    query: Any,
    sinks: Any,
    slopes: Any,
    *refs: Any,
    tile_tokens: int,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
    has_slopes: bool,
    num_blocks: int,
) -> None:
    """One span of keys for one tile of queries. refs: the span's blocks, their scales if they have some, the output,
    then top, total and sums."""
    *parts, out, top, total, sums = refs
    blocks, scale_blocks = parts[:num_blocks], parts[num_blocks:]
    n, j = pl.program_id(0), pl.program_id(1)
    num_kv_heads, rows, width = sums.shape
    block_size = blocks[0].shape[2]
    span = len(blocks) * block_size
    first, end = first_keys[n], ends[n]
    start = (jax.lax.div(first, span) + j) * span

    def begin() -> None:
        # A sink is one more key whose value is zero. Without one, the first key replaces the top that is never met.
        top[...] = sinks[...]
        total[...] = jnp.where(sinks[...] > _NEVER, 1.0, 0.0)
        sums[...] = jnp.zeros_like(sums)

    def of_span(h: int, begin: int, is_alive: Any) -> Any:
        """The scales of a head's keys (from 0) or values (from block_size), [1, span]."""
        found = jnp.concatenate([part[0, h : h + 1, begin : begin + block_size] for part in scale_blocks], 1)
        return jnp.where(is_alive, found, 0.0)

    def add_head(h: int, seen: Any, alive: Any, is_alive: Any, distance: Any) -> None:
        q = query[0, h]
        kv = jnp.concatenate([block[0, h].astype(jnp.float32) for block in blocks], 0)
        # What no query sees may hold anything, NaN too, and 0 * NaN is NaN.
        kv = jnp.where(alive, kv, 0.0).astype(q.dtype)
        keys, values = (kv, kv) if kv.shape[1] == width else (kv[:, :width], kv[:, width:])
        scores = _product(q, keys, 1) * scale
        if scale_blocks:
            scores = scores * of_span(h, 0, is_alive)
        if softcap:
            scores = softcap * jnp.tanh(scores / softcap)
        if has_slopes:
            scores = scores + slopes[h] * distance.astype(jnp.float32)
        new_top = jnp.maximum(top[h], jnp.where(seen, scores, _NEVER).max(1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - new_top), 0.0)
        fade = jnp.exp(top[h] - new_top)
        total[h] = total[h] * fade + weights.sum(1, keepdims=True)
        if scale_blocks:
            weights = weights * of_span(h, block_size, is_alive)
        sums[h] = sums[h] * fade + _product(weights.astype(q.dtype), values, 0)
        top[h] = new_top

    def add_span() -> None:
        places = start + jax.lax.broadcasted_iota(jnp.int32, (rows, span), 1)
        q_places = positions[n] + jax.lax.rem(jax.lax.broadcasted_iota(jnp.int32, (rows, span), 0), tile_tokens)
        seen = (places <= q_places) & (places >= first) & (places < end)
        if window:
            seen = seen & (q_places - places < window)
        if chunk:
            seen = seen & (places >= q_places - jax.lax.rem(q_places, chunk))
        key_places = start + jax.lax.broadcasted_iota(jnp.int32, (span, 1), 0)
        alive = (key_places >= first) & (key_places < end)
        key_places = start + jax.lax.broadcasted_iota(jnp.int32, (1, span), 1)
        is_alive = (key_places >= first) & (key_places < end)  # the same along the other axis
        for h in range(num_kv_heads):
            add_head(h, seen, alive, is_alive, places - q_places)

    def finish() -> None:
        out[0] = (sums[...] / jnp.where(total[...] == 0.0, 1.0, total[...])).astype(out.dtype)

    pl.when(j == 0)(begin)
    pl.when(start < end)(add_span)
    pl.when(j == pl.num_programs(1) - 1)(finish)


def _product(x: Any, y: Any, axis: int) -> Any:
    """x [m, k] times y, whose axis `axis` is k, in float32."""
    return jax.lax.dot_general(
        x,
        y,
        (((1,), (axis,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def tile_tokens(num_heads: int, head_dim: int, most: int) -> int:
    """Tokens of a tile of queries, a power of two, at most `most`: fewer where heads are many and wide (latents)."""
    values = num_heads * (head_dim if head_dim % LANES == 0 else 2 * head_dim)
    while most > 1 and most * values > MAX_TILE_VALUES:
        most //= 2
    return most


def table_fits(shape: Sequence[int]) -> bool:
    """True if a block table [num_reqs, max_num_blocks] fits in scalar memory."""
    return 4 * shape[0] * -(-shape[1] // LANES) * LANES <= MAX_TABLE_BYTES
