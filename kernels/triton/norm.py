"""RMS and layer norm over the last axis: a program holds a few whole rows in registers."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    sum_ptr,
    num_rows,
    inner,
    stride_outer,
    stride_inner,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    LAYER: tl.constexpr,
    ADD: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Row r of x lies at (r // inner) * stride_outer + (r % inner) * stride_inner; the results are contiguous.

    ADD: x += residual (contiguous), rounded to x's dtype and stored to sum first. LAYER: subtract the mean.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (col < N)[None, :]
    start = (row // inner) * stride_outer + (row % inner) * stride_inner
    x = tl.load(x_ptr + start[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)
    place = row[:, None] * N + col[None, :]
    if ADD:
        x += tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + place, rounded, mask=mask)
        x = rounded.to(tl.float32)
    if LAYER:
        mean = tl.sum(x, 1) / N
        x = tl.where(mask, x - mean[:, None], 0.0)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / N + eps)
    y = x * scale[:, None]
    if WEIGHT:
        y *= tl.load(weight_ptr + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        y += tl.load(bias_ptr + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=mask)
