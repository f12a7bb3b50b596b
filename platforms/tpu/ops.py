"""The op provider of TPUs: attention and KV writes by the Pallas kernels, on each device for its own heads."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from headrace.core.config import KV_DTYPES
from headrace.core.ops.jax import FUNCTIONS
from headrace.core.ops.jax.attention import KV_HEADS_AXIS, TILE_TOKENS, Integers, query_tiles, to_integers
from headrace.core.platform import OpProvider
from headrace.core.runner.jax_sharding import AXIS
from headrace.core.stages import Array
from headrace.kernels.pallas import attention, write_kv

NAME = "pallas"


@cache
def pallas_provider(mesh: Mesh, *, interpret: bool) -> OpProvider:
    """The kernels on a mesh, the same for all models: what JAX compiled for one serves the next. interpret: run them
    step by step in XLA, where there is no compiler for them."""

    def store(kv_cache: Array, key: Array, value: Array, slot_mapping: Array) -> Array:
        """See core/ops/attention.py."""
        if not key.shape[0]:
            return kv_cache
        if isinstance(kv_cache, Integers):
            return store_integers(kv_cache, key, value, slot_mapping)
        rows = jnp.concatenate([key, value], -1).astype(kv_cache.dtype)
        call = _over_heads(
            mesh,
            lambda cache, rows, slots: write_kv.write_kv(cache, rows, slots, interpret=interpret),
            (heads_axis(kv_cache), heads_axis(kv_cache), None),
            heads_axis(kv_cache),
        )
        return call(kv_cache, rows, slot_mapping)

    def store_integers(kv_cache: Integers, key: Array, value: Array, slot_mapping: Array) -> Integers:
        (key_codes, key_scales), (value_codes, value_scales) = to_integers(key), to_integers(value)
        rows = jnp.concatenate([key_codes, value_codes], -1).astype(jnp.float32)
        scales = jnp.stack([key_scales, value_scales], -1)
        axis = heads_axis(kv_cache)
        call = _over_heads(
            mesh, lambda *arrays: write_kv.write_int8_kv(*arrays, interpret=interpret), (axis,) * 4 + (None,), axis
        )
        codes, scales = call(kv_cache.codes, kv_cache.scales, rows, scales, slot_mapping)
        return Integers(codes=codes, scales=scales)

    def attend(
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
        """See core/ops/attention.py."""
        num_tokens = query.shape[0]
        is_plain = causal and relative_bias is None and reach is None
        if not num_tokens or not is_plain or not attention.table_fits(block_table.shape):
            return FUNCTIONS["paged_attention"](
                query,
                kv_cache,
                query_start_loc,
                seq_lens,
                block_table,
                scale=scale,
                window=window,
                chunk=chunk,
                softcap=softcap,
                sinks=sinks,
                alibi_slopes=alibi_slopes,
                relative_bias=relative_bias,
                reach=reach,
                causal=causal,
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
            )
        heads = query.shape[1] // (mesh.size if heads_axis(kv_cache) is not None else 1)
        tile_tokens = 1 if max_query_len == 1 else attention.tile_tokens(heads, query.shape[2], TILE_TOKENS)
        tiles = query_tiles(query_start_loc, seq_lens, num_tokens, tile_tokens, window, chunk)

        def tiled(*arrays: Any) -> Any:
            return attention.paged_attention(
                *arrays, scale=scale, window=window, chunk=chunk, softcap=softcap, interpret=interpret
            )

        axis = heads_axis(kv_cache)
        head = None if sinks is None else 0, None if alibi_slopes is None else 0
        values, scales = kv_cache if isinstance(kv_cache, Integers) else (kv_cache, None)
        axes = (2, axis, None, None, None, None, None, *head, None if scales is None else axis)
        out = _over_heads(mesh, tiled, axes, 2)(
            query[tiles.tokens],
            values,
            block_table,
            tiles.requests,
            tiles.positions[:, 0],
            tiles.first_keys,
            tiles.ends,
            sinks,
            alibi_slopes,
            scales,
        )
        return out.reshape(-1, *query.shape[1:])[tiles.places]

    static = ("scale", "window", "chunk", "softcap", "causal", "max_query_len", "max_seq_len")
    ops = {
        "new_kv_cache": FUNCTIONS["new_kv_cache"],
        "write_kv": jax.jit(store),
        "paged_attention": jax.jit(attend, static_argnames=static),
    }
    return OpProvider(name=NAME, priority=60, ops=ops, kv_dtypes=KV_DTYPES)


def heads_axis(kv_cache: Array) -> int | None:
    """The axis by which a cache is cut, which is that of new keys and values too; None for a single head."""
    return KV_HEADS_AXIS if kv_cache.shape[KV_HEADS_AXIS] > 1 else None


def _over_heads(
    mesh: Mesh, function: Callable[..., Any], head_axes: tuple[int | None, ...], out_axis: int | None
) -> Callable[..., Any]:
    """Run `function` on each device for its own heads. head_axes: of each argument, None for one that is whole."""
    if mesh.size == 1:
        return function

    def spec(axis: int | None) -> PartitionSpec:
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, AXIS)

    mapped: Callable[..., Any] = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=tuple(spec(axis) for axis in head_axes),
        out_specs=spec(out_axis),
        check_vma=False,
    )
    return mapped
