"""Rotary position embedding: a program turns a few heads of one token."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl


@triton.jit
def rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    num_heads,
    stride_token,
    stride_head,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Pairs are (i, i + HALF), or (2i, 2i + 1) if INTERLEAVED; what lies behind 2 * HALF is copied."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, HALF_BLOCK)
    mask = (head < num_heads)[:, None] & (i < HALF)[None, :]
    if INTERLEAVED:
        first, second = 2 * i, 2 * i + 1
    else:
        first, second = i, i + HALF
    source = x_ptr + token * stride_token + head[:, None] * stride_head
    target = out_ptr + (token * num_heads + head)[:, None] * HEAD_DIM
    a = tl.load(source + first[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + second[None, :], mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * HALF + i, mask=i < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * HALF + i, mask=i < HALF, other=0.0)[None, :]
    tl.store(target + first[None, :], (a * cos - b * sin).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(target + second[None, :], (b * cos + a * sin).to(out_ptr.dtype.element_ty), mask=mask)
    if REST_BLOCK > 0:
        rest = 2 * HALF + tl.arange(0, REST_BLOCK)
        mask = (head < num_heads)[:, None] & (rest < HEAD_DIM)[None, :]
        tl.store(target + rest[None, :], tl.load(source + rest[None, :], mask=mask, other=0.0), mask=mask)
