"""Rotary position embedding (Su et al. 2021) in all its layouts."""

from collections.abc import Sequence
from itertools import groupby

from ..stages import Array


def rotary_angles(
    positions: Array,
    inv_freq: Array,
    attention_factor: Array,
    rows: Array | None = None,
    *,
    axes: Sequence[int] = (),
) -> tuple[Array, Array]:
    """Cosines and sines of this step, once per kind of rope.

    positions: int32 [num_tokens]. inv_freq: float32 [variants, rotary_dim / 2], attention_factor: float32
    [variants]. rows: int32 [num_tokens] picks the variant of each token (LongRoPE); None is variant 0. axes: where
    positions are int32 [num_tokens, num_axes], the axis that each of the rotary_dim / 2 frequencies turns by.
    Returns (cos, sin), float32 [num_tokens, rotary_dim / 2], both times the attention factor.
    """
    import torch

    pick = 0 if rows is None else rows.long()
    factor = attention_factor[pick]
    places = positions[:, None]
    if axes:  # views of runs of one axis, joined: an index would be an array that comes from the host
        runs = [(axis, len(list(run))) for axis, run in groupby(axes)]
        places = torch.cat([positions[:, axis : axis + 1].expand(-1, size) for axis, size in runs], 1)
    angles = places.to(inv_freq.dtype) * inv_freq[pick]
    if rows is not None:
        factor = factor[:, None]
    return angles.cos() * factor, angles.sin() * factor


def rope(x: Array, cos: Array, sin: Array, *, interleaved: bool = False) -> Array:
    """Rotate the first rotary_dim values of each head.

    x: [num_tokens, num_heads, head_dim]; cos, sin: float32 [num_tokens, rotary_dim / 2], rotary_dim <= head_dim.
    A pair is (x[i], x[i + rotary_dim / 2]), or (x[2i], x[2i + 1]) if interleaved. Products in float32.
    Returns x's shape and dtype.
    """
    import torch

    cos, sin = cos[:, None, :], sin[:, None, :]
    rotary_dim = 2 * cos.shape[-1]
    wide = x[..., :rotary_dim].to(torch.promote_types(x.dtype, cos.dtype))
    if interleaved:
        a, b = wide[..., 0::2], wide[..., 1::2]
        rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = wide.chunk(2, -1)
        rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([rotated.to(x.dtype), x[..., rotary_dim:]], -1)
