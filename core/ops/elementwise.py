"""Elementwise and shape ops: residual adds, activations, splits, gathers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..stages import Array

if TYPE_CHECKING:
    import torch

    from ..models.spec import Activation


def add(x: Array, y: Array) -> Array:
    """x + y, both of one shape and dtype."""
    return x + y


def scale(x: Array, factor: float) -> Array:
    """x * factor; the factor is rounded to x's dtype first."""
    import torch

    return x * torch.tensor(factor, dtype=x.dtype).item()


def softcap(x: Array, cap: float) -> Array:
    """cap * tanh(x / cap), in float32 at least, as x's dtype."""
    import torch

    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (cap * torch.tanh(wide / cap)).to(x.dtype)


def act(x: Array, *, activation: "Activation") -> Array:
    """An activation function by value, in float32 at least, as x's dtype.

    gelu_tanh is the tanh approximation, gelu_10 is gelu within [-10, 10], relu2 is relu squared, quick_gelu is
    x * sigmoid(1.702 x), leaky_relu has a slope of 0.01 below 0, laplace is the integral of a normal distribution of
    mean 0.707107 and deviation 0.282095, linear is x.
    """
    import torch

    return activate(x.to(torch.promote_types(x.dtype, torch.float32)), activation).to(x.dtype)


def act_mul(x: Array, *, activation: "Activation") -> Array:
    """act(gate) * up (Shazeer 2020) where x: [num_tokens, 2 * n] holds gate then up. Returns [num_tokens, n]."""
    import torch

    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
    return (activate(gate, activation) * up).to(x.dtype)


def gate(x: Array, gates: Array) -> Array:
    """x * sigmoid(gates), in float32 at least, as x's dtype.

    x: [num_tokens, n]; gates: of x's shape, or [num_tokens, 1]. Or x: [num_tokens, num_heads, head_dim]; gates:
    [num_tokens, num_heads].
    """
    import torch

    wide = torch.promote_types(x.dtype, torch.float32)
    gates = gates[..., None] if gates.dim() < x.dim() else gates
    return (x.to(wide) * gates.to(wide).sigmoid()).to(x.dtype)


def xielu(x: Array, alpha_p: Array, alpha_n: Array) -> Array:
    """xIELU (Huang and Schlag 2024) in float32 at least, as x's dtype; beta is 0.5 and epsilon -1e-6.

    alpha_p, alpha_n: float32 [1], before softplus.
    """
    import torch
    import torch.nn.functional as F

    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    beta = 0.5
    up = F.softplus(alpha_p) * wide.square() + beta * wide
    down = (torch.expm1(wide.clamp(max=-1e-6)) - wide) * (beta + F.softplus(alpha_n)) + beta * wide
    return torch.where(wide > 0, up, down).to(x.dtype)


def mul(x: Array, y: Array) -> Array:
    """x * y in float32 at least, as x's dtype.

    x: [num_tokens, n]; y: float32 [n] or [num_tokens, 1], or of x's shape and dtype, or [num_tokens, 1] in it. Or
    x: [num_tokens, num_heads, head_dim]; y: [num_tokens, num_heads] in its dtype.
    """
    import torch

    y = y[..., None] if 1 < y.dim() < x.dim() else y
    return (x.to(torch.promote_types(x.dtype, torch.float32)) * y).to(x.dtype)


def clamp(x: Array, *, limit: float) -> Array:
    """x cut to [-limit, limit]."""
    return x.clamp(-limit, limit)


def log_growth(positions: Array, *, factor: float, length: int, shift: int = 0) -> Array:
    """1 + factor * log(1 + floor((position + shift) / length)), the growth of queries over long contexts.

    positions: int32 [num_tokens]. Returns float32 [num_tokens, 1].
    """
    import torch

    steps = torch.div(positions + shift, length, rounding_mode="floor")
    return (1 + factor * torch.log1p(steps.to(torch.float32)))[:, None]


def concat(arrays: Sequence[Array]) -> Array:
    """Join along the last axis: each [..., n] -> [..., sum of n]."""
    import torch

    return torch.cat(list(arrays), -1)


def split(x: Array, sizes: Sequence[int]) -> tuple[Array, ...]:
    """Cut the last axis: [..., sum(sizes)] -> one [..., size] for each."""
    return tuple(x.split(list(sizes), -1))


def split_heads(x: Array, *, head_dim: int) -> Array:
    """[num_tokens, num_heads * head_dim] -> [num_tokens, num_heads, head_dim]."""
    return x.unflatten(-1, (-1, head_dim))


def merge_heads(x: Array) -> Array:
    """[num_tokens, num_heads, head_dim] -> [num_tokens, num_heads * head_dim]."""
    return x.flatten(1)


def gather(x: Array, indices: Array) -> Array:
    """Rows of x: [n, ...] by indices: int32 [m] -> [m, ...]."""
    return x[indices.long()]


def cast(x: Array, *, dtype: str) -> Array:
    """x in another dtype, by headrace's name."""
    from ._torch import torch_dtype

    return x.to(torch_dtype(dtype))


def activate(x: "torch.Tensor", activation: "Activation") -> "torch.Tensor":
    """An activation function in x's own dtype; not an op, but what ops with an activation share."""
    import torch.nn.functional as F

    match activation:
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu":
            return F.relu(x)
        case "relu2":
            return F.relu(x).square()
        case "relu6":
            return F.relu6(x)
        case "leaky_relu":
            return F.leaky_relu(x)
        case "gelu_10":
            return F.gelu(x).clamp(-10, 10)
        case "quick_gelu":
            return x * (1.702 * x).sigmoid()
        case "hardswish":
            return F.hardswish(x)
        case "mish":
            return F.mish(x)
        case "laplace":
            return 0.5 * (1 + ((x - 0.707107) / (0.282095 * 2**0.5)).erf())
        case "linear":
            return x
        case "tanh":
            return x.tanh()
        case "sigmoid":
            return x.sigmoid()
        case "softplus":
            return F.softplus(x)
        case "sqrtsoftplus":
            return F.softplus(x).sqrt()
