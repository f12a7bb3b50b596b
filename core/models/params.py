"""Declared parameters: from this one list come loading, slicing, quantization, dummy weights and `plan`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Shard = Literal["column", "row", "vocab", "expert", "replicated"]
"""How tensor parallelism may cut a parameter: by output rows, by input columns, by vocabulary rows, between stacked
matrices, not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A range of output rows of a fused parameter, as checkpoints store it: q, k and v of qkv_proj."""

    name: str
    """canonical name, such as layers.0.attn.q_proj.weight"""
    rows: int
    is_sensitive: bool = False
    """of a parameter that is, the part that makes it so; devices may store the others apart from it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One parameter of a model.

    name: canonical, such as layers.0.attn.qkv_proj.weight. shape: [out_features, in_features] of a linear,
    [vocab_size, hidden_size] of an embedding, [n] of a vector.
    kind: "linear" may be packed and quantized; "embedding" is read by rows (and may serve as lm_head);
    "stacked" is num_stacked matrices of one shape, one under the other (experts, heads), as one [num_stacked *
    out_features, in_features]; "vector" (norm weights, biases) stays in float32; "constant" is computed by
    `compute`, not read.
    parts: the stacked pieces, top to bottom, that a checkpoint may hold instead of the whole.
    larger_parts: other such pieces, each of one or several parts.
    compute: of a constant; of anything else what stands in where the checkpoint has no such tensor, [*shape].
    num_groups: a whole may be stored in so many groups that each hold their share of every part (Stored.interleaved).
    num_joined: inputs beside the first one, whose columns may be stored in turn (Stored.joined).
    """

    name: str
    shape: tuple[int, ...]
    kind: Literal["linear", "embedding", "stacked", "vector", "constant"]
    shard: Shard = "replicated"
    parts: tuple[Part, ...] = ()
    larger_parts: tuple[Part, ...] = ()
    num_groups: int = 1
    num_stacked: int = 1
    num_joined: int = 0
    quantizable: bool = False
    """a device may hold it in integers"""
    is_sensitive: bool = False
    """rounding it to 4 bits costs more than its size is worth"""
    plus_one: bool = False
    """add one to the stored values"""
    unit_rows: bool = False
    """divide each stored row by its length"""
    compute: Callable[[], npt.NDArray[np.float32]] | None = None
    combine: Callable[..., npt.NDArray[np.float32]] | None = None
    """makes the values, [*shape], of those of the parts, each float32, instead of stacking them"""

    @property
    def num_elements(self) -> int:
        """Values in the parameter."""
        count = 1
        for size in self.shape:
            count *= size
        return count
