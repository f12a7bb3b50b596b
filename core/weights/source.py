"""Tensors on their way from a checkpoint to a device: numpy at the border, no torch.

A WeightSource is one checkpoint (any format) with its own names. A ParamSource gives a runner the declared
parameters of a spec, one at a time, so that no two full copies are ever held.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..models.params import Param

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "uint16": 2, "uint32": 4, "uint64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """What a checkpoint's index says of a tensor; nothing of its data has been read."""

    name: str
    dtype: str
    """a key of DTYPE_BYTES, or a GGUF block type in lower case such as "q4_1" """
    shape: tuple[int, ...]
    file: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTensor:
    """A tensor on the host.

    data: [*shape] in the numpy dtype of `dtype`; bfloat16 as uint16 bit patterns, float8 as uint8 bit patterns;
    a block type as uint8 [rows, bytes of a row], rows = product of shape[:-1]. It may be a read-only view of
    a file mapping: copy, never write.
    scales, offsets: float32 [rows, num_groups] of a weight in codes, whose dtype is theirs ("int8", "int4" as uint8
    in [0, 15], "float8_e4m3fn"): value = code * scale + offset, for each of num_groups equal runs of columns.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[Any]
    file: str = ""
    scales: npt.NDArray[np.float32] | None = None
    offsets: npt.NDArray[np.float32] | None = None

    @property
    def is_blocked(self) -> bool:
        """True for a GGUF block type."""
        return self.scales is None and self.dtype not in DTYPE_BYTES

    def rows(self, part: slice) -> "HostTensor":
        """Some rows of a matrix, as a view."""
        data = self.data[part]
        return replace(
            self,
            shape=(len(data), *self.shape[1:]),
            data=data,
            scales=None if self.scales is None else self.scales[part],
            offsets=None if self.offsets is None else self.offsets[part],
        )

    @property
    def group(self) -> int:
        """Columns of a weight in integers that share a scale."""
        assert self.scales is not None, f"{self.name} has no scales"
        num_groups: int = self.scales.shape[1]
        return self.shape[-1] // num_groups


class WeightSource(Protocol):
    """One checkpoint."""

    def names(self) -> Sequence[str]:
        """Names of all tensors, as the checkpoint spells them."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Index entry of one tensor. KeyError if there is none."""
        ...

    def read(self, name: str) -> HostTensor:
        """One tensor. Raises WeightError that names file and tensor."""
        ...

    def close(self) -> None:
        """Close files and mappings."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedParam:
    """A declared parameter with its data: one tensor, or the stacked parts of a fused parameter, each of which
    may have another dtype (GGUF mixes block types)."""

    param: Param
    tensors: tuple[HostTensor, ...]


class ParamSource(Protocol):
    """The declared parameters of one model."""

    def params(self) -> Sequence[Param]:
        """All declarations, in the order of `__iter__`."""
        ...

    def __iter__(self) -> Iterator[LoadedParam]:
        """Each parameter once. Raises WeightError for a missing, extra, duplicate or mis-shaped tensor."""
        ...


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy dtype that holds `dtype` in a HostTensor."""
    carrier = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}.get(dtype, dtype)
    return np.dtype(carrier)
