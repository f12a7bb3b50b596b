"""Rotary position embedding: a program turns a few heads of a few tokens."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens"])
def rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    num_tokens,
    num_heads,
    stride_token,
    stride_head,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Pairs are (i, i + HALF), or (2i, 2i + 1) if INTERLEAVED; what lies behind 2 * HALF is copied."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :, None]
    i = tl.arange(0, HALF_BLOCK)[None, None, :]
    is_pair = (token < num_tokens) & (i < HALF)
    is_row = (token < num_tokens) & (head < num_heads)
    mask = is_row & (i < HALF)
    if INTERLEAVED:
        first, second = 2 * i, 2 * i + 1
    else:
        first, second = i, i + HALF
    source = x_ptr + token * stride_token + head * stride_head
    target = out_ptr + (token * num_heads + head) * HEAD_DIM
    a = tl.load(source + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + second, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * HALF + i, mask=is_pair, other=0.0)
    sin = tl.load(sin_ptr + token * HALF + i, mask=is_pair, other=0.0)
    tl.store(target + first, (a * cos - b * sin).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(target + second, (b * cos + a * sin).to(out_ptr.dtype.element_ty), mask=mask)
    if REST_BLOCK > 0:
        rest = 2 * HALF + tl.arange(0, REST_BLOCK)[None, None, :]
        mask = is_row & (rest < HEAD_DIM)
        tl.store(target + rest, tl.load(source + rest, mask=mask, other=0.0), mask=mask)
