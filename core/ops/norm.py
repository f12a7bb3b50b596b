"""Normalisations. Statistics and scaling in float32 (or the input's dtype if that is wider)."""

from ..stages import Array


def rms_norm(x: Array, weight: Array | None, *, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich 2019).

    x: [..., n], weight: float32 [n] or None for one. Returns x's shape and dtype.
    """
    import torch

    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight).to(x.dtype)


def add_rms_norm(x: Array, residual: Array, weight: Array | None, *, eps: float) -> tuple[Array, Array]:
    """The residual add and the norm that follows it: s = x + residual; returns (rms_norm(s), s).

    x, residual: [num_tokens, n]. Both results have x's dtype; s is rounded to it before the norm.
    """
    total = x + residual
    return rms_norm(total, weight, eps=eps), total


def magnitude(x: Array, *, centred: bool = False) -> Array:
    """The root of each row's mean square, or of its variance: [num_tokens, n] -> float32 [num_tokens, 1]."""
    import torch

    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if centred:
        wide = wide - wide.mean(-1, keepdim=True)
    return wide.square().mean(-1, keepdim=True).sqrt()


def layer_norm(x: Array, weight: Array | None, bias: Array | None, *, eps: float) -> Array:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis (Ba et al. 2016).

    x: [..., n], weight and bias: float32 [n] or None. Returns x's shape and dtype.
    """
    import torch

    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(x.dtype)
