"""Paged attention and the KV cache against dense attention written in numpy float64, over poisoned blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from .arrays import compare, to_array, to_numpy, to_slice
from .registry import DTYPES, NotSupported, Subject, add_check
from .values import LONG_SUMS, Value

Float64 = npt.NDArray[np.float64]
RAGGED = ((1, 1), (16, 16), (1, 33), (0, 20), (5, 37), (1, 16), (17, 17), (3, 48), (1, 130))
"""(query tokens, sequence length) of each request: decode, whole prompt, chunk, a block's edge, nothing to do."""
LARGE = ((1, 700), (257, 513), (64, 64), (1, 1))
DECODE = ((1, 1), (1, 16), (1, 33), (0, 20), (1, 1100), (1, 513))
"""A step of one token a request, which may have kernels of its own; long ones may be split along their keys."""
LONG = ((1, 5000), (2, 4300))
"""More keys than 4096, where counters and tables may end."""
LONG_DECODE = ((1, 5000), (1, 4300))
ALLOWED = {"float32": 1e-9, "float16": 5e-7, "bfloat16": 3e-5}
"""Of what is summed in float32, a result has its own rounding and that of the weights of values alone."""
MOST_POISONED = 512
"""Blocks of which every slot is poisoned; of more, those that belong to a request."""
MANY = tuple((1 + index % 3, 3 + 5 * index % 19) for index in range(70))
"""More requests than one tile, warp or register has lanes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One shape of attention and the terms that it adds to the scores."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    relative: bool = False
    causal: bool = True
    reach: bool = False
    query_size: float = 1.0
    kv_size: float = 1.0
    scale: float = 0.0
    """0: 1 / sqrt(head_dim)"""
    is_mean: bool = False
    """every key counts the same and no value is negative: a result is the mean of thousands of numbers"""
    block_size: int = 0
    """0: one that the device takes"""
    kv_dtype: str = ""
    max_blocks: int = 0
    """blocks that a request has; a longer one reads some of them again and again. 0: as many as it needs"""
    has_bounds: bool = True
    """the caller knows the longest query and sequence"""
    sink_size: float = 1.0
    is_slice: bool = False
    """query, key and value are parts of a split, whose rows may lie apart"""
    spare_blocks: int = 4
    """blocks that no request has"""
    spare_columns: int = 1
    """of the block table, behind the longest request's"""
    feature: str = ""
    requests: Sequence[tuple[int, int]] = RAGGED


VARIANTS = {
    "plain": Variant(),
    "one_kv_head": Variant(num_heads=6, num_kv_heads=1, head_dim=64),
    "all_kv_heads": Variant(num_heads=3, num_kv_heads=3, head_dim=80),
    "large": Variant(num_heads=9, num_kv_heads=3, head_dim=64, requests=LARGE),
    "window": Variant(window=20, feature="sliding_window"),
    "window_of_a_block": Variant(window=16, feature="sliding_window"),
    "large_window": Variant(window=200, feature="sliding_window", requests=LARGE),
    "chunk": Variant(chunk=20, feature="chunked_attention"),
    "wide_chunk": Variant(chunk=200, feature="chunked_attention"),
    "chunk_of_a_block": Variant(chunk=16, feature="chunked_attention"),
    "chunk_of_one": Variant(chunk=1, feature="chunked_attention"),
    "large_chunk": Variant(chunk=200, feature="chunked_attention", requests=LARGE),
    "chunk_decode": Variant(chunk=530, softcap=4.0, sinks=True, feature="chunked_attention", requests=DECODE),
    "chunk_reach": Variant(
        chunk=100, reach=True, alibi=True, num_heads=6, num_kv_heads=1, feature="chunked_attention", requests=LARGE
    ),
    "softcap": Variant(softcap=5.0, feature="softcap"),
    "edge_window": Variant(window=18, feature="sliding_window", requests=((1, 33), (1, 49), (1, 65), (2, 50))),
    "window_softcap": Variant(window=9, softcap=3.0, head_dim=32, feature="sliding_window"),
    "window_of_one": Variant(window=1, feature="sliding_window"),
    "sinks": Variant(sinks=True, head_dim=64),
    "large_sinks": Variant(sinks=True, sink_size=200.0),
    "window_sinks": Variant(window=20, sinks=True, head_dim=64, feature="sliding_window"),
    "window_sinks_decode": Variant(window=40, sinks=True, feature="sliding_window", requests=DECODE),
    "softcap_sinks": Variant(softcap=2.0, sinks=True, feature="softcap"),
    "window_alibi": Variant(window=20, alibi=True, feature="sliding_window"),
    "softcap_large_scores": Variant(softcap=5.0, query_size=600.0, feature="softcap"),
    "slices": Variant(is_slice=True, num_heads=6, num_kv_heads=3, head_dim=24),
    "slices_decode": Variant(is_slice=True, num_heads=6, num_kv_heads=3, head_dim=24, requests=((1, 20), (1, 40))),
    "empty_requests": Variant(requests=((0, 0), (0, 20), (3, 20), (0, 0), (1, 1), (5, 37), (0, 33), (0, 0))),
    "wide_table": Variant(spare_columns=90),
    "wide_table_decode": Variant(spare_columns=90, requests=DECODE),
    "many_blocks": Variant(num_heads=2, num_kv_heads=1, spare_blocks=2100, requests=((1, 2500), (3, 40))),
    "blocks_of_64": Variant(block_size=64),
    "heads_of_80_decode": Variant(num_heads=6, num_kv_heads=2, head_dim=80, requests=((1, 20), (1, 40))),
    "wide_heads_decode": Variant(num_heads=8, num_kv_heads=2, head_dim=256, requests=((1, 20), (1, 40))),
    "alibi": Variant(alibi=True),
    "decode": Variant(num_heads=6, num_kv_heads=2, head_dim=32, requests=DECODE),
    "decode_sinks": Variant(sinks=True, num_heads=6, num_kv_heads=2, requests=DECODE),
    "decode_alibi": Variant(alibi=True, requests=DECODE),
    "decode_window": Variant(window=530, softcap=4.0, feature="sliding_window", requests=DECODE),
    "relative": Variant(relative=True, feature="relative_bias", requests=(*RAGGED, (2, 300))),
    "relative_decode": Variant(relative=True, feature="relative_bias", requests=DECODE),
    "all_keys": Variant(causal=False, feature="cross_attention"),
    "reach": Variant(reach=True),
    "reach_window": Variant(
        reach=True, window=20, num_heads=6, num_kv_heads=1, feature="sliding_window", requests=LARGE
    ),
    "large_scores": Variant(query_size=60.0, head_dim=32),
    "large_values": Variant(kv_size=300.0, query_size=0.01),
    "wide_heads": Variant(num_heads=10, num_kv_heads=10, head_dim=256, requests=((3, 5), (1, 40))),
    "many_heads": Variant(num_heads=32, num_kv_heads=2, requests=((1, 50), (9, 20))),
    "heads_of_96": Variant(num_heads=6, num_kv_heads=2, head_dim=96, requests=((3, 20), (1, 40))),
    "heads_of_128": Variant(num_heads=40, num_kv_heads=8, head_dim=128, requests=((3, 20), (1, 40))),
    "heads_of_128_decode": Variant(num_heads=40, num_kv_heads=8, head_dim=128, requests=((1, 20), (1, 40))),
    "latents": Variant(num_heads=20, num_kv_heads=1, head_dim=576, requests=((3, 20), (1, 40))),
    "latents_decode": Variant(num_heads=20, num_kv_heads=1, head_dim=576, requests=((1, 20), (1, 40))),
    "own_scale": Variant(scale=0.37, num_heads=6, num_kv_heads=3),
    "own_scale_decode": Variant(scale=0.37, num_heads=6, num_kv_heads=3, requests=((1, 1), (1, 33), (1, 40))),
    "many_requests": Variant(num_heads=2, num_kv_heads=1, requests=MANY),
    "many_requests_decode": Variant(num_heads=2, num_kv_heads=1, requests=tuple((1, k) for _, k in MANY)),
    "long": Variant(num_heads=2, num_kv_heads=1, max_blocks=9, requests=LONG),
    "long_window": Variant(window=4096, max_blocks=9, feature="sliding_window", requests=LONG_DECODE),
    "long_sums": Variant(query_size=0.0, is_mean=True, num_heads=2, num_kv_heads=1, max_blocks=9, requests=LONG),
    "unknown_lengths": Variant(has_bounds=False),
    "blocks_of_32": Variant(block_size=32),
    "int8_cache": Variant(kv_dtype="int8", num_heads=6, num_kv_heads=3, head_dim=64),
    "int8_cache_of_all_terms": Variant(
        kv_dtype="int8",
        head_dim=128,
        window=20,
        softcap=3.0,
        sinks=True,
        alibi=True,
        feature="sliding_window",
    ),
    "int8_cache_chunk": Variant(kv_dtype="int8", num_heads=6, num_kv_heads=3, chunk=20, feature="chunked_attention"),
    "int8_cache_reach": Variant(kv_dtype="int8", num_heads=6, num_kv_heads=3, reach=True, block_size=32),
    "int8_cache_decode": Variant(kv_dtype="int8", num_heads=6, num_kv_heads=3, window=530, requests=DECODE),
}


def dense_attention(
    query: Float64,
    keys: Float64,
    values: Float64,
    variant: Variant,
    *,
    scale: float,
    sinks: Float64 | None,
    slopes: Float64 | None,
    relative: Float64 | None,
    reach: Sequence[int] = (),
) -> Float64:
    """Attention of one request: query [q, num_heads, d] are the last of the k positions of keys and values
    [k, num_kv_heads, d]. One head and one query at a time, so that nothing is shared with the definition."""
    num_queries, num_heads, _ = query.shape
    num_keys = len(keys)
    out = np.zeros_like(query)
    for head in range(num_heads):
        kv_head = head * keys.shape[1] // num_heads
        for row in range(num_queries):
            position = num_keys - num_queries + row
            first = max(0, position - variant.window + 1) if variant.window else 0
            first = position // variant.chunk * variant.chunk if variant.chunk else first
            end = max(position + 1, reach[row] if reach else 0) if variant.causal else num_keys
            seen = np.arange(first, end)
            scores = keys[seen, kv_head] @ query[row, head] * scale
            if variant.softcap:
                scores = variant.softcap * np.tanh(scores / variant.softcap)
            if slopes is not None:
                scores = scores - slopes[head] * (position - seen)
            if relative is not None:
                buckets = [distance_bucket(distance, len(relative)) for distance in (position - seen).tolist()]
                scores = scores + relative[buckets, head]
            top = scores.max() if sinks is None else max(scores.max(), sinks[head])
            weights = np.exp(scores - top)
            total = weights.sum() + (0.0 if sinks is None else np.exp(sinks[head] - top))
            out[row, head] = weights @ values[seen, kv_head] / total
    return out


def distance_bucket(distance: int, num_buckets: int) -> int:
    """T5's bucket of a key so many tokens before its query (Raffel et al. 2020), with whole numbers alone.

    The k-th bucket behind the single distances begins where distance / exact reaches (128 / exact)^(k / rest).
    """
    exact = num_buckets // 2
    if distance < exact:
        return distance
    rest = num_buckets - exact
    steps = sum(1 for k in range(1, rest) if distance**rest * exact**k >= 128**k * exact**rest)
    return exact + steps


def rounded_rows(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Keys or values as a cache of int8 holds them, by float32: 255 levels up to the largest of a token and head."""
    top = np.abs(x).max(-1, keepdims=True)
    levels = np.rint(x * np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0))
    values: npt.NDArray[np.float32] = levels * (top / np.float32(127))
    return values


def _need(variant: Variant, subject: Subject) -> None:
    """Raise NotSupported for what the device said that it lacks."""
    for feature in filter(None, (variant.feature, "softcap" if variant.softcap else "")):
        subject.need(feature=feature)
    sizes = subject.device.caps.block_sizes
    if variant.block_size and sizes and variant.block_size not in sizes:
        raise NotSupported(f"the device has no blocks of {variant.block_size} tokens")
    if variant.kv_dtype and variant.kv_dtype not in subject.device.caps.kv_dtypes:
        raise NotSupported(f"the device has no KV cache of {variant.kv_dtype}")


def _check_attention(variant: Variant, dtype: str, subject: Subject) -> str:
    _need(variant, subject)
    size = variant.block_size or subject.block_size
    ops, rng = subject.ops(dtype, kv_dtype=variant.kv_dtype, block_size=size), np.random.default_rng(0)
    heads, kv_heads, head_dim = variant.num_heads, variant.num_kv_heads, variant.head_dim
    lens = np.array([seq_len for _, seq_len in variant.requests], np.int32)
    counts = np.array([count for count, _ in variant.requests], np.int32)
    needed = -(-lens // size)
    kept = np.minimum(needed, variant.max_blocks or needed)
    num_blocks = int(kept.sum()) + 1 + variant.spare_blocks
    cache = ops.new_kv_cache(
        num_blocks=num_blocks,
        block_size=size,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=variant.kv_dtype or dtype,
        device=subject.place,
    )

    def activation(size: float, *shape: int) -> Value:
        return Value("activation", np.float32(size) * rng.standard_normal(shape).astype(np.float32))

    # Blocks at random, the table padded with -1; blocks that left the window are stale.
    # The longest request begins in the last block: -1 must not be taken for the last slot either.
    ids = rng.permutation(np.arange(1, num_blocks))
    first = int(kept[: lens.argmax()].sum())
    last = int(ids.argmax())
    ids[[first, last]] = ids[[last, first]]
    table = np.full((len(lens), int(needed.max()) + variant.spare_columns), -1, np.int32)
    slots, places = [], []  # of what is stored, and where each position of a request lies in it
    num_stored = 0
    for row, (seq_len, blocks, count) in enumerate(zip(lens, needed, kept, strict=True)):
        own, ids = ids[:count], ids[count:]
        turns = np.arange(blocks) if count == blocks else rng.integers(0, count, blocks)
        table[row, :blocks] = own[turns]
        positions, stored = np.arange(seq_len), np.arange(seq_len if count == blocks else count * size)
        slots.append((own[stored // size] * size + stored % size).astype(np.int32))
        places.append(num_stored + turns[positions // size] * size + positions % size)
        num_stored += len(stored)
    # Every slot is NaN first: reading one that was never written shows in the result.
    owned = np.arange(num_blocks) if num_blocks <= MOST_POISONED else np.append(np.unique(table[table >= 0]), ids[0])
    every_slot = (owned[:, None] * size + np.arange(size)).astype(np.int32).ravel()
    poison = to_array(
        ops, Value("activation", np.full((len(every_slot), kv_heads, head_dim), np.nan, np.float32)), dtype
    )
    cache = ops.write_kv(cache, poison, poison, ops.to_device(every_slot))
    stored_kv = [activation(variant.kv_size, num_stored, kv_heads, head_dim) for _ in range(2)]
    if variant.is_mean:
        stored_kv[1] = Value("activation", rng.random((num_stored, kv_heads, head_dim), np.float32))
    for array in (part.array for part in stored_kv if variant.kv_dtype):
        array[::7] = 0  # of which no scale can be made
    key, value = (to_array(ops, part, dtype) for part in stored_kv)
    # Padding: a slot of -1 must not land in a block that someone owns, and may stand between others.
    all_slots = np.concatenate([*slots, np.full(2, -1, np.int32)])
    order = rng.permutation(len(all_slots)).astype(np.int32)
    new = [replace(part, array=_with_padding(part.array)[order]) for part in stored_kv]
    keys, values = ((to_slice if variant.is_slice else to_array)(ops, part, dtype) for part in new)
    cache = ops.write_kv(cache, keys, values, ops.to_device(all_slots[order]))
    padding = to_array(ops, Value("activation", np.full((3, kv_heads, head_dim), np.nan, np.float32)), dtype)
    cache = ops.write_kv(cache, padding, padding, ops.to_device(np.full(3, -1, np.int32)))
    if variant.window or variant.chunk:
        for row, (count, seq_len) in enumerate(variant.requests):
            start = max(0, seq_len - count)
            stale = (start // variant.chunk * variant.chunk if variant.chunk else start - variant.window + 1) // size
            stale = max(0, stale)
            table[row, :stale] = ids[0]

    asked = activation(variant.query_size, int(counts.sum()), heads, head_dim)
    query = (to_slice if variant.is_slice else to_array)(ops, asked, dtype)
    sinks = np.float32(variant.sink_size) * rng.standard_normal(heads, np.float32) if variant.sinks else None
    slopes = (0.5 ** np.arange(1, heads + 1)).astype(np.float32) if variant.alibi else None
    relative = rng.standard_normal((32, heads)).astype(np.float32) if variant.relative else None
    reach = [_reach(rng, count, seq_len) for count, seq_len in variant.requests] if variant.reach else []
    scale = variant.scale or head_dim**-0.5
    result = ops.paged_attention(
        query,
        cache,
        ops.to_device(np.cumsum([0, *counts]).astype(np.int32)),
        ops.to_device(lens),
        ops.to_device(table),
        scale=scale,
        window=variant.window,
        chunk=variant.chunk,
        softcap=variant.softcap,
        sinks=None if sinks is None else ops.to_device(sinks),
        alibi_slopes=None if slopes is None else ops.to_device(slopes),
        relative_bias=None if relative is None else ops.to_device(relative),
        reach=ops.to_device(np.concatenate(reach)) if reach else None,
        causal=variant.causal,
        max_query_len=int(counts.max()) if variant.has_bounds else 0,
        max_seq_len=int(lens.max()) if variant.has_bounds else 0,
    )
    q, *kv = (to_numpy(ops, array) for array in (query, key, value))
    k, v = (array[np.concatenate(places)] for array in kv)
    if variant.kv_dtype:
        k, v = rounded_rows(k), rounded_rows(v)
    expected = _expected(variant, q, k, v, scale, sinks, slopes, relative, reach)
    allowed = (LONG_SUMS if variant.is_mean else ALLOWED)[dtype]
    error = compare(to_numpy(ops, result), expected, allowed, "attention")
    return f"{len(lens)} requests, error {error:.1e}, allowed {allowed:.0e}"


def _with_padding(array: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Two rows more, which are NaN."""
    return np.concatenate([array, np.full((2, *array.shape[1:]), np.nan, np.float32)])


def _reach(rng: np.random.Generator, count: int, seq_len: int) -> npt.NDArray[np.int32]:
    """Some of a request's tokens see to the end of a run that they stand in, as the places of an image do."""
    ends = rng.integers(0, seq_len + 1, count)
    ends[::3] = 0
    return ends.astype(np.int32)


def _expected(
    variant: Variant,
    query: npt.NDArray[np.float32],
    key: npt.NDArray[np.float32],
    value: npt.NDArray[np.float32],
    scale: float,
    sinks: npt.NDArray[np.float32] | None,
    slopes: npt.NDArray[np.float32] | None,
    relative: npt.NDArray[np.float32] | None,
    reach: Sequence[npt.NDArray[np.int32]],
) -> Float64:
    parts = []
    q_start = k_start = 0
    for request, (count, seq_len) in enumerate(variant.requests):
        parts.append(
            dense_attention(
                query[q_start : q_start + count].astype(np.float64),
                key[k_start : k_start + seq_len].astype(np.float64),
                value[k_start : k_start + seq_len].astype(np.float64),
                variant,
                scale=scale,
                sinks=None if sinks is None else sinks.astype(np.float64),
                slopes=None if slopes is None else slopes.astype(np.float64),
                relative=None if relative is None else relative.astype(np.float64),
                reach=reach[request].tolist() if reach else (),
            )
        )
        q_start, k_start = q_start + count, k_start + seq_len
    return np.concatenate(parts)


def _register() -> None:
    for name, variant in VARIANTS.items():
        for dtype in DTYPES:
            meaning = "write_kv and paged_attention over random, poisoned blocks against dense float64 attention"
            add_check(f"attention.{name}.{dtype}", meaning, partial(_check_attention, variant, dtype))


_register()
