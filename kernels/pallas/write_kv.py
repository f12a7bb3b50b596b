"""Storing keys and values in Pallas: one step of the grid for each token, each KV block fetched and stored once."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def write_kv(kv_cache: Any, rows: Any, slot_mapping: Any, *, interpret: bool) -> Any:
    """The cache, in place, with rows[i] stored in slot slot_mapping[i]; a slot of -1 is stored nowhere.

    kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_dim]; rows: [num_tokens, num_kv_heads, 2 * head_dim],
    key and value side by side; slot_mapping: int32 [num_tokens], no slot twice.
    """
    slots, order, num_stored = _in_order(slot_mapping)
    block = _block_of_token(kv_cache, kv_cache.shape[2])
    return pl.pallas_call(
        _store,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_stored,),
            in_specs=[_row_of_token(rows), block],
            out_specs=block,
        ),
        out_shape=jax.ShapeDtypeStruct(kv_cache.shape, kv_cache.dtype),
        input_output_aliases={3: 0},
        interpret=interpret,
    )(slots, order, rows, kv_cache)


def write_int8_kv(
    kv_cache: Any, scales: Any, rows: Any, row_scales: Any, slot_mapping: Any, *, interpret: bool
) -> Any:
    """(kv_cache, scales), in place, with codes and scales of each token in its slot.

    kv_cache: int8 [num_blocks, num_kv_heads, block_size, 2 * head_dim]; scales: float32 [num_blocks, num_kv_heads,
    2 * block_size]; rows: whole numbers as float32, [num_tokens, num_kv_heads, 2 * head_dim]; row_scales: float32
    [num_tokens, num_kv_heads, 2], of key and value; slot_mapping: as `write_kv` has it.
    """
    slots, order, num_stored = _in_order(slot_mapping)
    block, scale_block = (_block_of_token(part, kv_cache.shape[2]) for part in (kv_cache, scales))
    return pl.pallas_call(
        _store_integers,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_stored,),
            in_specs=[
                _row_of_token(rows),
                _row_of_token(row_scales),
                block,
                scale_block,
            ],
            out_specs=[block, scale_block],
        ),
        out_shape=[jax.ShapeDtypeStruct(part.shape, part.dtype) for part in (kv_cache, scales)],
        input_output_aliases={4: 0, 5: 1},
        interpret=interpret,
    )(slots, order, rows, row_scales, kv_cache, scales)


def _row_of_token(rows: Any) -> Any:
    """The row of each step's token, of [num_tokens, ...]."""
    return pl.BlockSpec((1, *rows.shape[1:]), lambda i, slots, order: (order[i], *(0,) * (rows.ndim - 1)))


def _block_of_token(part: Any, block_size: int) -> Any:
    """What lies in the KV block of each step's token, of [num_blocks, ...]."""

    def index(i: Any, slots: Any, order: Any) -> tuple[Any, ...]:
        return jax.lax.div(slots[i], block_size), *(0,) * (part.ndim - 1)

    return pl.BlockSpec((1, *part.shape[1:]), index)


def _in_order(slot_mapping: Any) -> tuple[Any, Any, Any]:
    """(slots with those that are stored first, 0 for the others, which token each is of, how many are stored).

    In the order of slots, so that the tokens of one block follow each other: a block that came back later would be
    fetched while it may still be on its way out.
    """
    last = jnp.iinfo(jnp.int32).max
    slots, order = jax.lax.sort(
        (jnp.where(slot_mapping < 0, last, slot_mapping), jnp.arange(len(slot_mapping), dtype=jnp.int32)), num_keys=1
    )
    # A chip that fetches ahead of a step that never comes must find a block there.
    return jnp.where(slots == last, 0, slots), order, jnp.sum(slot_mapping >= 0, dtype=jnp.int32)


def _is_new(slots: Any, i: Any, block_size: int) -> Any:
    """True if token i is the first of its block."""
    before = jax.lax.div(slots[jnp.maximum(i - 1, 0)], block_size)
    return (i == 0) | (before != jax.lax.div(slots[i], block_size))


def _store_integers(
    slots: Any, order: Any, row: Any, row_scales: Any, block: Any, scale_block: Any, out: Any, out_scales: Any
) -> None:
    """`_store` of codes and scales."""
    i = pl.program_id(0)
    num_kv_heads, block_size = out.shape[1:3]

    def begin() -> None:
        out[...] = block[...]
        out_scales[...] = scale_block[...]

    pl.when(_is_new(slots, i, block_size))(begin)
    offset = jax.lax.rem(slots[i], block_size)
    here = jax.lax.broadcasted_iota(jnp.int32, (block_size, 1), 0) == offset
    for h in range(num_kv_heads):
        stored = jnp.where(here, row[0, h : h + 1], out[0, h].astype(jnp.float32))
        out[0, h] = stored.astype(jnp.int32).astype(jnp.int8)
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, 2 * block_size), 1)
    kept = jnp.where(lane == offset, row_scales[0, :, 0:1], out_scales[0])
    out_scales[0] = jnp.where(lane == offset + block_size, row_scales[0, :, 1:2], kept)


def _store(slots: Any, order: Any, row: Any, block: Any, out: Any) -> None:
    """Put one token into its block, which stays where it is while the next token goes into the same one."""
    i = pl.program_id(0)
    num_kv_heads, block_size = out.shape[1:3]

    def begin() -> None:
        out[...] = block[...]

    pl.when(_is_new(slots, i, block_size))(begin)

    here = jax.lax.broadcasted_iota(jnp.int32, (block_size, 1), 0) == jax.lax.rem(slots[i], block_size)
    for h in range(num_kv_heads):
        # Through float32, because not every vector unit selects 16-bit values.
        old, new = out[0, h].astype(jnp.float32), row[0, h : h + 1].astype(jnp.float32)
        out[0, h] = jnp.where(here, new, old).astype(out.dtype)
