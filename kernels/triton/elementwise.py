"""Activations, and rows by index: a program has one stretch of a few rows."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """tanh of float32, from the exponential; triton's own is not on every backend."""
    return 1.0 - 2.0 / (tl.exp(tl.minimum(2.0 * x, 80.0)) + 1.0)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) of float32, where the exponential stays finite."""
    return 1.0 / (1.0 + tl.exp(tl.minimum(-x, 80.0)))


@triton.jit
def softplus(x):
    """log(1 + exp(x)) of float32, with the digits that 1 + exp(-|x|) drops."""
    small = tl.exp(-tl.abs(x))
    whole = 1.0 + small
    return tl.maximum(x, 0.0) + tl.log(whole) - ((whole - 1.0) - small) / whole


@triton.jit
def gelu(x):
    """x times the integral of the normal distribution, of float32."""
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """An activation of float32 by its name in core/ops/elementwise.py."""
    if ACTIVATION == "silu":
        return x * sigmoid(x)
    elif ACTIVATION == "gelu":
        return gelu(x)
    elif ACTIVATION == "gelu_10":
        return tl.minimum(tl.maximum(gelu(x), -10.0), 10.0)
    elif ACTIVATION == "gelu_tanh":
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "relu":
        return tl.maximum(x, 0.0)
    elif ACTIVATION == "relu2":
        y = tl.maximum(x, 0.0)
        return y * y
    elif ACTIVATION == "relu6":
        return tl.minimum(tl.maximum(x, 0.0), 6.0)
    elif ACTIVATION == "leaky_relu":
        return tl.maximum(x, 0.01 * x)
    elif ACTIVATION == "hardswish":
        return x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) / 6.0
    elif ACTIVATION == "mish":
        return x * tanh(softplus(x))
    elif ACTIVATION == "laplace":
        return 0.5 * (1.0 + tl.erf((x - 0.707107) / 0.3989425748461166))
    elif ACTIVATION == "linear":
        return x
    elif ACTIVATION == "tanh":
        return tanh(x)
    elif ACTIVATION == "sigmoid":
        return sigmoid(x)
    elif ACTIVATION == "softplus":
        return softplus(x)
    elif ACTIVATION == "sqrtsoftplus":
        return tl.sqrt(softplus(x))
    else:
        tl.static_assert(ACTIVATION == "quick_gelu")
        return x * sigmoid(1.702 * x)


@triton.jit(do_not_specialize=["num_rows"])
def activation_kernel(
    x_ptr,
    out_ptr,
    num_rows,
    stride_row,
    n,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
):
    """out[row, :n] = activation(x[row, :n]), times x[row, n : 2 * n] if GATED."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (col < n)[None, :]
    source = x_ptr + (row * stride_row)[:, None] + col[None, :]
    y = activate(tl.load(source, mask=mask, other=0.0).to(tl.float32), ACTIVATION)
    if GATED:
        y *= tl.load(source + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + (row * n)[:, None] + col[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def gather_kernel(
    x_ptr,
    index_ptr,
    out_ptr,
    num_rows,
    stride_row,
    n,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[i] = x[index[i]], rows of n values."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (i < num_rows)[:, None] & (col < n)[None, :]
    row = tl.load(index_ptr + i, mask=i < num_rows, other=0).to(tl.int64)
    x = tl.load(x_ptr + (row * stride_row)[:, None] + col[None, :], mask=mask)
    tl.store(out_ptr + (i * n)[:, None] + col[None, :], x, mask=mask)
