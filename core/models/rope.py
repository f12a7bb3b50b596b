"""Tables of inverse frequencies for rotary embeddings, in float32 as transformers computes them."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .spec import ModelSpec, RopeScaling, RopeSpec

FloatArray = npt.NDArray[np.float32]
NUM_AXES = 3
"""Positions of a token where there are several: time, height and width."""


def has_axes(spec: ModelSpec) -> bool:
    """True if some layer's rope turns by several positions of a token."""
    return any(layer.attn.rope is not None and layer.attn.rope.axes for layer in spec.layers)


def distinct_ropes(spec: ModelSpec) -> tuple[RopeSpec, ...]:
    """The different ropes of a model by first use; rope n has the tables rope.{n}.inv_freq and .attention_factor."""
    return tuple(dict.fromkeys(layer.attn.rope for layer in spec.layers if layer.attn.rope is not None))


def rope_numbers(spec: ModelSpec) -> list[int]:
    """For each layer, which of `distinct_ropes` it turns by; -1 if none."""
    by_value: dict[RopeSpec, int] = {}
    by_id: dict[int, int] = {}  # layers share objects, and comparing LongRoPE's lists costs more than an op
    numbers = []
    for layer in spec.layers:
        rope = layer.attn.rope
        number = -1 if rope is None else by_id.get(id(rope), -1)
        if rope is not None and number < 0:
            number = by_id[id(rope)] = by_value.setdefault(rope, len(by_value))
        numbers.append(number)
    return numbers


def rope_tables(rope: RopeSpec) -> tuple[FloatArray, FloatArray]:
    """(inv_freq float32 [variants, rotary_dim / 2], attention_factor float32 [variants]).

    LongRoPE (Ding et al. 2024) has two variants, row 0 for short and row 1 for long sequences; "dynamic" has row n
    for sequences of n tokens more than the model was trained on; all else has one.
    Cosines and sines are multiplied by the attention factor.
    """
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim - rope.is_odd)
    if rope.frequencies != "all":  # of two axes
        evens, odds = exponents[::2], exponents[1::2]
        exponents = np.concatenate([evens, evens if rope.frequencies == "repeated" else odds])
    wavelengths: FloatArray = np.power(np.float32(rope.theta), exponents)
    plain: FloatArray = np.float32(1) / wavelengths
    scaling = rope.scaling
    rows: list[npt.NDArray[np.floating]]
    if scaling is None:
        rows, factor = [plain], 1.0
    elif scaling.kind == "linear":
        rows, factor = [plain / np.float32(scaling.factor)], 1.0
    elif scaling.kind == "dynamic":
        rows, factor = _dynamic(rope, scaling, num_rope_variants(rope)), 1.0
    elif scaling.kind == "llama3":
        rows, factor = [_llama3(plain, scaling)], 1.0
    elif scaling.kind == "proportional":
        turned = np.arange(len(plain)) < scaling.num_turned
        rows, factor = [np.where(turned, plain / np.float32(scaling.factor), 0)], 1.0
    elif scaling.kind == "yarn":
        rows, factor = [_yarn(wavelengths, rope, scaling)], _yarn_attention_factor(scaling)
    else:
        lists = (scaling.short_factor, scaling.long_factor)[: num_rope_variants(rope)]
        rows = [np.divide(plain, factors, dtype=np.float32) for factors in lists]
        factor = _longrope_attention_factor(scaling)
    inv_freq = np.stack(rows).astype(np.float32) * np.float32(-1 if rope.backwards else 1)
    return inv_freq, np.full(len(rows), factor, dtype=np.float32)


def num_rope_variants(rope: RopeSpec) -> int:
    """Rows of the rope's tables, see `rope_tables`."""
    scaling = rope.scaling
    if scaling is not None and scaling.kind == "longrope" and scaling.short_factor != scaling.long_factor:
        return 2
    if scaling is not None and scaling.kind == "dynamic":
        length = scaling.original_max_position_embeddings
        return max(1, int(length * scaling.factor) - length + 1)
    return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeRows:
    """Which row of the rope tables a request takes, by the length of its prompt.

    transformers changes rows when a batch grows past original_len; a request keeps one row here, because keys in
    its cache were turned by it.
    """

    original_len: int = 0
    num_rows: int = 1

    def row(self, num_prompt_tokens: int) -> int:
        """The row of a prompt: 0 up to original_len tokens."""
        return min(max(num_prompt_tokens - self.original_len, 0), self.num_rows - 1)


ONE_ROW = RopeRows()


def rope_rows(spec: ModelSpec) -> RopeRows:
    """How requests choose among the rows of the model's rope tables."""
    for layer in spec.layers:
        rope = layer.attn.rope
        if rope is not None and rope.scaling is not None and (num_rows := num_rope_variants(rope)) > 1:
            return RopeRows(original_len=rope.scaling.original_max_position_embeddings, num_rows=num_rows)
    return ONE_ROW


def _dynamic(rope: RopeSpec, scaling: RopeScaling, num_rows: int) -> list[npt.NDArray[np.floating]]:
    # The base grows with the sequence, so that the longest wave always spans it ("NTK-aware").
    growth = scaling.factor * np.arange(num_rows) / scaling.original_max_position_embeddings + 1
    dim = rope.rotary_dim - rope.is_odd
    bases = rope.theta * growth ** (dim / (dim - 2))
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return list(np.float32(1) / np.power(bases.astype(np.float32)[:, None], exponents))


def _llama3(inv_freq: FloatArray, scaling: RopeScaling) -> npt.NDArray[np.floating]:
    # Long waves are stretched by the factor, short ones stay, and between the two limits it blends linearly.
    length = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    waves = np.float32(2 * math.pi) / inv_freq
    blend = (np.float32(length) / waves - np.float32(low)) / np.float32(high - low)
    stretched = inv_freq / np.float32(scaling.factor)
    blended = (1 - blend) * stretched + blend * inv_freq
    return np.where(waves > length / low, stretched, np.where(waves < length / high, inv_freq, blended))


def _yarn(wavelengths: FloatArray, rope: RopeSpec, scaling: RopeScaling) -> npt.NDArray[np.floating]:
    # Peng et al. 2023, section 3.2: dimensions below `low` keep their frequency, those above `high` are stretched.
    def dimension(rotations: float) -> float:
        turns = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp: FloatArray = np.clip(
        (np.arange(rope.rotary_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1
    )
    stretched = np.float32(1) / (np.float32(scaling.factor) * wavelengths)
    return stretched * ramp + (np.float32(1) / wavelengths) * (np.float32(1) - ramp)


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)


def _longrope_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position_embeddings))
