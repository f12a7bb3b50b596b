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
    block_size = kv_cache.shape[2]
    # In the order of slots, so that the tokens of one block follow each other: a block that came back later would be
    # fetched while it may still be on its way out.
    last = jnp.iinfo(jnp.int32).max
    slots, order = jax.lax.sort(
        (jnp.where(slot_mapping < 0, last, slot_mapping), jnp.arange(len(slot_mapping), dtype=jnp.int32)), num_keys=1
    )
    num_stored = jnp.sum(slot_mapping >= 0, dtype=jnp.int32)

    def of_row(i: Any, slots: Any, order: Any) -> tuple[Any, ...]:
        return order[i], 0, 0

    def of_block(i: Any, slots: Any, order: Any) -> tuple[Any, ...]:
        return jax.lax.div(slots[i], block_size), 0, 0, 0

    block = pl.BlockSpec((1, *kv_cache.shape[1:]), of_block)
    return pl.pallas_call(
        _store,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_stored,),
            in_specs=[pl.BlockSpec((1, *rows.shape[1:]), of_row), block],
            out_specs=block,
        ),
        out_shape=jax.ShapeDtypeStruct(kv_cache.shape, kv_cache.dtype),
        input_output_aliases={3: 0},
        interpret=interpret,
    )(slots, order, rows, kv_cache)


def _store(slots: Any, order: Any, row: Any, block: Any, out: Any) -> None:
    """Put one token into its block, which stays where it is while the next token goes into the same one."""
    i = pl.program_id(0)
    num_kv_heads, block_size = out.shape[1:3]
    before = jax.lax.div(slots[jnp.maximum(i - 1, 0)], block_size)
    is_new = (i == 0) | (before != jax.lax.div(slots[i], block_size))

    def begin() -> None:
        out[...] = block[...]

    pl.when(is_new)(begin)

    here = jax.lax.broadcasted_iota(jnp.int32, (block_size, 1), 0) == jax.lax.rem(slots[i], block_size)
    for h in range(num_kv_heads):
        # Through float32, because not every vector unit selects 16-bit values.
        old, new = out[0, h].astype(jnp.float32), row[0, h : h + 1].astype(jnp.float32)
        out[0, h] = jnp.where(here, new, old).astype(out.dtype)
