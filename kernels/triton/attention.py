"""Paged attention of a ragged batch, and the writing of keys and values into their slots.

One kernel serves prefill, chunks, drafts and decode. A program owns a tile of rows, each one query head of one token
of one request and KV head, and walks over that request's keys with an online softmax (Dao et al. 2022). Decode steps
are split along the keys, at fixed positions, and the parts are joined by a second kernel.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from .elementwise import tanh
from .rounded import round_half_even

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_tokens"])
def write_kv_kernel(
    key_ptr,
    value_ptr,
    keys_ptr,
    values_ptr,
    slot_ptr,
    num_tokens,
    key_stride,
    value_stride,
    n,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """keys[slot[i]] = key[i] and values[slot[i]] = value[i], n values each; a negative slot is left out."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_ptr + i, mask=i < num_tokens, other=-1).to(tl.int64)
    mask = (slot >= 0)[:, None] & (col < n)[None, :]
    key = tl.load(key_ptr + (i * key_stride)[:, None] + col[None, :], mask=mask)
    value = tl.load(value_ptr + (i * value_stride)[:, None] + col[None, :], mask=mask)
    place = (slot * n)[:, None] + col[None, :]
    tl.store(keys_ptr + place, key.to(keys_ptr.dtype.element_ty), mask=mask)
    tl.store(values_ptr + place, value.to(values_ptr.dtype.element_ty), mask=mask)


@triton.jit
def write_int8_kv_kernel(
    key_ptr,
    value_ptr,
    keys_ptr,
    values_ptr,
    key_scale_ptr,
    value_scale_ptr,
    slot_ptr,
    key_stride,
    value_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """As write_kv_kernel, in integers with a scale for each token and head."""
    i = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slot_ptr + i).to(tl.int64)
    if slot < 0:
        return
    cell = slot * NUM_KV_HEADS + head
    dim = tl.arange(0, DIM_BLOCK)
    source = head * HEAD_DIM + dim
    mask = dim < HEAD_DIM
    key = tl.load(key_ptr + i * key_stride + source, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(value_ptr + i * value_stride + source, mask=mask, other=0.0).to(tl.float32)
    codes, scale = _to_int8(key)
    tl.store(keys_ptr + cell * HEAD_DIM + dim, codes, mask=mask)
    tl.store(key_scale_ptr + cell, scale)
    codes, scale = _to_int8(value)
    tl.store(values_ptr + cell * HEAD_DIM + dim, codes, mask=mask)
    tl.store(value_scale_ptr + cell, scale)


@triton.jit
def _to_int8(x):
    """(codes, scale) of a vector; the scale is NaN where one of its numbers is NaN or infinite."""
    is_finite = tl.abs(x) < float("inf")
    top = tl.max(tl.where(is_finite, tl.abs(x), 0.0), 0)
    inverse = tl.where(top > 0.0, 127.0 / tl.where(top > 0.0, top, 1.0), 0.0)
    codes = round_half_even(tl.where(is_finite, x, 0.0) * inverse).to(tl.int8)
    is_bad = tl.max(tl.where(is_finite, 0, 1), 0) > 0
    return codes, tl.where(is_bad, float("nan"), top / 127.0)


@triton.jit(do_not_specialize=["num_reqs", "table_stride"])
def attention_kernel(
    query_ptr,
    keys_ptr,
    values_ptr,
    key_scale_ptr,
    value_scale_ptr,
    out_ptr,
    part_ptr,
    stat_ptr,
    starts_ptr,
    lens_ptr,
    table_ptr,
    sinks_ptr,
    slopes_ptr,
    reach_ptr,
    scale,
    softcap,
    num_reqs,
    query_stride_token,
    query_stride_head,
    table_stride,
    window,
    chunk,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PIECE: tl.constexpr,
    EARLY: tl.constexpr,
    SPLIT: tl.constexpr,
    DECODE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    REACH: tl.constexpr,
    INT8: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """See the module. SPLIT: keys of a program, 0 for all; then (part, stat) get what the join needs.

    A tile has TILE_HEADS of the heads of a KV head; programs of axis 1 have its others. REST_BLOCK: values of a head
    behind the first DIM_BLOCK (latents of 512 + 64), 0 for none.
    PIECE: values of queries and keys that are multiplied at a time, where queries as a whole do not fit in registers;
    0: all. EARLY: values are loaded ahead of keys, which takes fewer registers on some GPUs. DECODE: each request has
    at most one token, and tile r is request r. REACH: a token also sees the positions behind its own that are less
    than its reach. INT8: keys and values are codes, with scales of their own. WIDE_DOT: products of float32.
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    PARTS: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    QUERIES: tl.constexpr = 1 if DECODE else ROWS // TILE_HEADS
    tile = tl.program_id(0)
    kv_head = tl.program_id(1) // PARTS
    if DECODE:
        request = tile
        first = 0
    else:
        # Request r owns the tiles from starts[r] // QUERIES + r on: find the last r for which that is <= tile.
        low = 0
        high = num_reqs
        while high - low > 1:
            middle = (low + high) // 2
            if tl.load(starts_ptr + middle) // QUERIES + middle <= tile:
                low = middle
            else:
                high = middle
        request = low
        first = (tile - (tl.load(starts_ptr + request) // QUERIES + request)) * QUERIES
    start = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - start
    if first >= count:
        return
    seq_len = tl.load(lens_ptr + request)

    row = tl.arange(0, ROWS)
    local = first + row // TILE_HEADS
    in_group = tl.program_id(1) % PARTS * TILE_HEADS + row % TILE_HEADS
    head = kv_head * GROUP + in_group
    is_row = (row < QUERIES * TILE_HEADS) & (local < count) & (in_group < GROUP)
    token = (start + local).to(tl.int64)
    q_pos = seq_len - count + local
    dim = tl.arange(0, DIM_BLOCK)
    is_dim = dim < HEAD_DIM
    q_row = query_ptr + token[:, None] * query_stride_token + head[:, None] * query_stride_head
    dtype: tl.constexpr = tl.float32 if WIDE_DOT else query_ptr.dtype.element_ty
    if PIECE == 0:
        q = tl.load(q_row + dim[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0).to(dtype)
    if REST_BLOCK > 0:
        rest = DIM_BLOCK + tl.arange(0, REST_BLOCK)
        is_rest = rest < HEAD_DIM
        if PIECE == 0:
            q_rest = tl.load(q_row + rest[None, :], mask=is_row[:, None] & is_rest[None, :], other=0.0).to(dtype)
        out_rest = tl.zeros([ROWS, REST_BLOCK], tl.float32)

    # The keys that some row of the tile sees, cut to this program's split.
    begin = 0
    last = q_pos
    if REACH:
        last = tl.maximum(q_pos, tl.load(reach_ptr + token, mask=is_row, other=0) - 1)
        end = tl.minimum(seq_len, tl.max(tl.where(is_row, last, 0), 0) + 1)
    else:
        end = tl.minimum(seq_len, seq_len - count + first + QUERIES)
    if WINDOW:
        begin = tl.maximum(0, seq_len - count + first - window + 1)
    if CHUNK:
        lowest = q_pos // chunk * chunk
        begin = (seq_len - count + first) // chunk * chunk
    if SPLIT > 0:
        split = tl.program_id(2)
        begin = tl.maximum(begin, split * SPLIT)
        end = tl.minimum(end, split * SPLIT + SPLIT)
    else:
        split = 0

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        if split == 0:
            top = tl.load(sinks_ptr + head, mask=is_row, other=0.0) * LOG2E
            total = tl.full([ROWS], 1.0, tl.float32)
    if ALIBI:
        slope = tl.load(slopes_ptr + head, mask=is_row, other=0.0)
    out = tl.zeros([ROWS, DIM_BLOCK], tl.float32)
    for step in range(begin // KEYS, tl.cdiv(end, KEYS)):
        k_pos = step * KEYS + tl.arange(0, KEYS)
        is_key = (k_pos >= begin) & (k_pos < end)
        block = tl.load(table_ptr + request * table_stride + k_pos // BLOCK_SIZE, mask=is_key, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + k_pos % BLOCK_SIZE
        cell = slot * NUM_KV_HEADS + kv_head
        place = cell[:, None] * HEAD_DIM + dim[None, :]
        is_value = is_key[:, None] & is_dim[None, :]
        v_scale = None
        if EARLY:
            if INT8:
                v_scale = tl.load(value_scale_ptr + cell, mask=is_key, other=0.0)
            v = cached(values_ptr, place, is_value, v_scale, INT8, dtype)
        if PIECE == 0:
            k = cached(keys_ptr, place, is_value, None, False, dtype)
        if INT8:
            k_scale = tl.load(key_scale_ptr + cell, mask=is_key, other=0.0)
            if not EARLY:
                v_scale = tl.load(value_scale_ptr + cell, mask=is_key, other=0.0)
        if PIECE == 0:
            if not EARLY:
                v = cached(values_ptr, place, is_value, v_scale, INT8, dtype)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        else:
            scores = tl.zeros([ROWS, KEYS], tl.float32)
            for part in tl.range(0, HEAD_DIM, PIECE, num_stages=1):
                col = part + tl.arange(0, PIECE)
                mask = is_row[:, None] & (col < HEAD_DIM)[None, :]
                q = tl.load(q_row + col[None, :], mask=mask, other=0.0, volatile=True).to(dtype)
                mask = is_key[:, None] & (col < HEAD_DIM)[None, :]
                k = cached(keys_ptr, cell[:, None] * HEAD_DIM + col[None, :], mask, None, False, dtype)
                scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee")
            v = cached(values_ptr, place, is_value, v_scale, INT8, dtype)
        if REST_BLOCK > 0:
            rest_place = cell[:, None] * HEAD_DIM + rest[None, :]
            is_rest_value = is_key[:, None] & is_rest[None, :]
            v_rest = cached(values_ptr, rest_place, is_rest_value, v_scale, INT8, dtype)
            if PIECE == 0:
                k_rest = cached(keys_ptr, rest_place, is_rest_value, None, False, dtype)
                scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        scores = scores * scale
        if INT8:
            scores = scores * k_scale[None, :]
        if SOFTCAP:
            scores = softcap * tanh(scores / softcap)
        distance = k_pos[None, :] - q_pos[:, None]
        if ALIBI:
            scores += slope[:, None] * distance.to(tl.float32)
        seen = is_key[None, :] & (k_pos[None, :] <= last[:, None])
        if WINDOW:
            seen = seen & (distance > -window)
        if CHUNK:
            seen = seen & (k_pos[None, :] >= lowest[:, None])
        scores = tl.where(seen, scores * LOG2E, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        weights = weights.to(dtype)
        out = out * shrink[:, None] + tl.dot(weights, v, input_precision="ieee")
        if REST_BLOCK > 0:
            out_rest = out_rest * shrink[:, None] + tl.dot(weights, v_rest, input_precision="ieee")
        top = highest

    is_out = is_row[:, None] & is_dim[None, :]
    if SPLIT > 0:
        cell = (request * tl.num_programs(2) + split).to(tl.int64) * NUM_HEADS + head
        tl.store(part_ptr + cell[:, None] * HEAD_DIM + dim[None, :], out, mask=is_out)
        if REST_BLOCK > 0:
            is_out = is_row[:, None] & is_rest[None, :]
            tl.store(part_ptr + cell[:, None] * HEAD_DIM + rest[None, :], out_rest, mask=is_out)
        tl.store(stat_ptr + 2 * cell, top, mask=is_row)
        tl.store(stat_ptr + 2 * cell + 1, total, mask=is_row)
    else:
        total = tl.where(total == 0.0, 1.0, total)[:, None]
        place = (token * NUM_HEADS + head)[:, None] * HEAD_DIM
        tl.store(out_ptr + place + dim[None, :], (out / total).to(out_ptr.dtype.element_ty), mask=is_out)
        if REST_BLOCK > 0:
            is_out = is_row[:, None] & is_rest[None, :]
            tl.store(out_ptr + place + rest[None, :], (out_rest / total).to(out_ptr.dtype.element_ty), mask=is_out)


@triton.jit
def cached(ptr, place, mask, scale, SCALED: tl.constexpr, DTYPE: tl.constexpr):
    """Keys or values, [keys, columns]; zeros for what is not there. scale: of each key, if SCALED."""
    x = tl.load(ptr + place, mask=mask, other=0.0)
    if SCALED:
        x = x.to(tl.float32) * scale[:, None]
    return x.to(DTYPE)


@triton.jit(do_not_specialize=["num_splits"])
def join_kernel(
    part_ptr,
    stat_ptr,
    starts_ptr,
    out_ptr,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """Join the parts of one head of one request, in the order of their positions."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(starts_ptr + request).to(tl.int64)
    if tl.load(starts_ptr + request + 1) - token < 1:
        return
    dim = tl.arange(0, DIM_BLOCK)
    is_dim = dim < HEAD_DIM
    top = float("-inf")
    total = 0.0
    out = tl.zeros([DIM_BLOCK], tl.float32)
    for split in range(0, num_splits):
        cell = (request * num_splits + split).to(tl.int64) * NUM_HEADS + head
        its_top = tl.load(stat_ptr + 2 * cell)
        highest = tl.maximum(top, its_top)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        shrink = tl.exp2(top - base)
        grow = tl.exp2(its_top - base)
        total = total * shrink + tl.load(stat_ptr + 2 * cell + 1) * grow
        out = out * shrink + tl.load(part_ptr + cell * HEAD_DIM + dim, mask=is_dim, other=0.0) * grow
        top = highest
    out = out / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + (token * NUM_HEADS + head) * HEAD_DIM + dim, out.to(out_ptr.dtype.element_ty), mask=is_dim)
