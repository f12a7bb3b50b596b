"""Normalisations in JAX. Statistics and scaling in float32."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import jax
import jax.numpy as jnp

from ...stages import Array
from ._arrays import compiled, widen


@compiled("eps")
def rms_norm(x: Array, weight: Array | None, *, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    wide = widen(x)
    y = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps)
    return (y if weight is None else y * weight).astype(x.dtype)


@compiled("eps")
def add_rms_norm(x: Array, residual: Array, weight: Array | None, *, eps: float) -> tuple[Array, Array]:
    """(rms_norm(x + residual), x + residual)."""
    total = x + residual
    return rms_norm(total, weight, eps=eps), total


@compiled("eps")
def layer_norm(x: Array, weight: Array | None, bias: Array | None, *, eps: float) -> Array:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis."""
    wide = widen(x)
    centred = wide - wide.mean(-1, keepdims=True)
    y = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + eps)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.astype(x.dtype)


@compiled("centred")
def magnitude(x: Array, *, centred: bool = False) -> Array:
    """The root of each row's mean square, or of its variance, float32 [num_tokens, 1]."""
    wide = widen(x)
    if centred:
        wide = wide - wide.mean(-1, keepdims=True)
    return jnp.sqrt(jnp.square(wide).mean(-1, keepdims=True))


FUNCTIONS = (rms_norm, add_rms_norm, layer_norm, magnitude)
