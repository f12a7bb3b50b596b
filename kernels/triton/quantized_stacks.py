"""Stacked weights in 8 or 4 bits: the experts of a mixture, and the heads of latent attention."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from .elementwise import activate, sigmoid
from .experts import tile
from .quantized import elements, product


@triton.jit
def quantized_experts_kernel(
    x_ptr,
    x_scale_ptr,
    code_ptr,
    scale_ptr,
    offset_ptr,
    bias_ptr,
    weight_ptr,
    order_ptr,
    first_ptr,
    count_ptr,
    end_ptr,
    out_ptr,
    clamp,
    alpha,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TOTAL: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    FLOAT8: tl.constexpr,
    FNUZ: tl.constexpr,
    OFFSETS: tl.constexpr,
    ROUNDED: tl.constexpr,
    UP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    CLAMP: tl.constexpr,
    BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """UP: out[i] = act(gate(x[token])) * up(x[token]), or act(up(x[token])) unless GATED, for the sorted rows i; else
    out[pair] = down(x[i]).

    SCALE: times the pair's weight, before the bias and the activation of UP, behind the bias of down.
    """
    expert, row, is_row = tile(first_ptr, count_ptr, end_ptr, EXPERTS=EXPERTS, EXPERT_BLOCK=EXPERT_BLOCK, ROWS=ROWS)
    if expert >= EXPERTS:
        return
    pair = tl.load(order_ptr + row, mask=is_row, other=0).to(tl.int64)
    source = pair // PER_TOKEN if UP else row.to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    is_col = col < OUT
    weight_row = expert.to(tl.int64) * (2 * OUT if UP and GATED else OUT) + col
    total = product(
        x_ptr + source * IN,
        x_scale_ptr,
        source,
        is_row,
        code_ptr,
        scale_ptr,
        offset_ptr,
        weight_row,
        is_col,
        IN=IN,
        TOTAL=TOTAL,
        WIDTH=WIDTH,
        GROUP=GROUP,
        BITS=BITS,
        FLOAT8=FLOAT8,
        FNUZ=FNUZ,
        OFFSETS=OFFSETS,
        ROUNDED=ROUNDED,
        DEPTH=DEPTH,
        WIDE_DOT=WIDE_DOT,
    )
    if SCALE:
        factor = tl.load(weight_ptr + pair, mask=is_row, other=0.0)[:, None]
    if UP:
        if GATED:
            up = product(
                x_ptr + source * IN,
                x_scale_ptr,
                source,
                is_row,
                code_ptr,
                scale_ptr,
                offset_ptr,
                weight_row + OUT,
                is_col,
                IN=IN,
                TOTAL=TOTAL,
                WIDTH=WIDTH,
                GROUP=GROUP,
                BITS=BITS,
                FLOAT8=FLOAT8,
                FNUZ=FNUZ,
                OFFSETS=OFFSETS,
                ROUNDED=ROUNDED,
                DEPTH=DEPTH,
                WIDE_DOT=WIDE_DOT,
            )
            if SCALE:
                up *= factor
            if BIAS:
                up += tl.load(bias_ptr + weight_row + OUT, mask=is_col, other=0.0)[None, :]
        if SCALE:
            total *= factor
        if BIAS:
            total += tl.load(bias_ptr + weight_row, mask=is_col, other=0.0)[None, :]
        if CLAMP:
            total = tl.minimum(total, clamp)
            up = tl.minimum(tl.maximum(up, -clamp), clamp)
            total = (up + 1.0) * total * sigmoid(alpha * total)
        elif GATED:
            total = activate(total, ACTIVATION) * up
        else:
            total = activate(total, ACTIVATION)
    else:
        if BIAS:
            total += tl.load(bias_ptr + weight_row, mask=is_col, other=0.0)[None, :]
        if SCALE:
            total *= factor
    place = row.to(tl.int64) if UP else pair
    mask = is_row[:, None] & is_col[None, :]
    tl.store(out_ptr + place[:, None] * OUT + col[None, :], total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def quantized_heads_kernel(
    x_ptr,
    code_ptr,
    scale_ptr,
    offset_ptr,
    out_ptr,
    num_rows,
    stride_row,
    stride_head,
    HEADS: tl.constexpr,
    HEAD_ROWS: tl.constexpr,
    FIRST: tl.constexpr,
    ABSORB: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TOTAL: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    FLOAT8: tl.constexpr,
    FNUZ: tl.constexpr,
    OFFSETS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """out[i, head] = x[i, head] @ part, the rows of a head's matrix from FIRST on (ABSORB), or those rows transposed.

    x: [num_rows, HEADS, IN]; a head has HEAD_ROWS rows of the weight.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    head = tl.program_id(2)
    is_row = row < num_rows
    is_col = col < OUT
    first = head * HEAD_ROWS + FIRST
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, IN, DEPTH):
        k = start + tl.arange(0, DEPTH)
        is_k = k < IN
        place = row[:, None] * stride_row + head * stride_head + k[None, :]
        x = tl.load(x_ptr + place, mask=is_row[:, None] & is_k[None, :], other=0.0)
        mask = is_k[:, None] & is_col[None, :]
        weight_row = first + (k[:, None] if ABSORB else col[None, :])
        weight_col = col[None, :] if ABSORB else k[:, None]
        weight = elements(
            code_ptr,
            scale_ptr,
            offset_ptr,
            weight_row.to(tl.int64),
            weight_col,
            mask,
            TOTAL,
            WIDTH,
            GROUP,
            BITS,
            FLOAT8,
            FNUZ,
            OFFSETS,
        )
        if WIDE_DOT:
            x = x.to(tl.float32)
        total = tl.dot(x, weight.to(x.dtype), total, input_precision="ieee")
    place = (row[:, None] * HEADS + head) * OUT + col[None, :]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_col[None, :])
