"""Rotary position embedding in JAX."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from collections.abc import Sequence

import jax.numpy as jnp

from ...stages import Array
from ._arrays import compiled, widen


@compiled("axes")
def rotary_angles(
    positions: Array,
    inv_freq: Array,
    attention_factor: Array,
    rows: Array | None = None,
    *,
    axes: Sequence[int] = (),
) -> tuple[Array, Array]:
    """Cosines and sines of this step, [num_tokens, rotary_dim / 2]."""
    pick = 0 if rows is None else rows
    factor = attention_factor[pick]
    places = positions[:, jnp.asarray(axes)] if axes else positions[:, None]
    angles = places.astype(inv_freq.dtype) * inv_freq[pick]
    if rows is not None:
        factor = factor[:, None]
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


@compiled("interleaved")
def rope(x: Array, cos: Array, sin: Array, *, interleaved: bool = False) -> Array:
    """Rotate the first rotary_dim values of each head, in float32."""
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotary_dim = 2 * cos.shape[-1]
    wide = widen(x[..., :rotary_dim])
    if interleaved:
        a, b = wide[..., 0::2], wide[..., 1::2]
        rotated = jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(wide.shape)
    else:
        a, b = jnp.split(wide, 2, -1)
        rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    if rotary_dim == x.shape[-1]:
        return rotated.astype(x.dtype)
    return jnp.concatenate([rotated.astype(x.dtype), x[..., rotary_dim:]], -1)


FUNCTIONS = (rotary_angles, rope)
