"""Packs declared parameters into the layouts of the native kernels, part by part, without torch."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.core.weights.dequantize import to_float32
from headrace.core.weights.source import HostTensor, LoadedParam
from headrace.kernels.cpu import _ops

BLOCK_FORMATS = ("q8_0", "q4_0", "q4_1")
"""GGUF block types that the kernels multiply as they stand."""
_CHUNK_VALUES = 1 << 22


def choose_format(tensors: Sequence[HostTensor], dtype: str, *, keep_blocks: bool) -> "_ops.Format":
    """The packed format of a stacked parameter: its own blocks if they may be kept and all parts have the same."""
    if keep_blocks and is_blocked(tensors):
        return tensors[0].dtype  # type: ignore[return-value]
    return dtype  # type: ignore[return-value]


def is_blocked(tensors: Sequence[HostTensor]) -> bool:
    """True if all parts have one block type, and the kernels multiply it as it stands."""
    return tensors[0].dtype in BLOCK_FORMATS and len({tensor.dtype for tensor in tensors}) == 1


def pack(tensors: Sequence[HostTensor], dtype: str, *, keep_blocks: bool) -> _ops.PackedWeight:
    """One packed weight from parts stacked along their rows, each [rows, in_features].

    A part that is not kept as blocks goes through float32 in pieces of at most 16 MiB.
    """
    wanted = choose_format(tensors, dtype, keep_blocks=keep_blocks)
    rows = sum(tensor.shape[0] for tensor in tensors)
    weight = _ops.PackedWeight(wanted, rows, tensors[0].shape[1])
    start = 0
    for tensor in tensors:
        if wanted in BLOCK_FORMATS:
            weight.write_blocks(start, np.ascontiguousarray(tensor.data))
        else:
            _write_dense(weight, start, tensor)
        start += tensor.shape[0]
    return weight


def vector(loaded: LoadedParam) -> npt.NDArray[np.float32]:
    """A parameter that is not packed, as float32, its parts joined."""
    return np.concatenate([to_float32(tensor) for tensor in loaded.tensors])


def _write_dense(weight: _ops.PackedWeight, start: int, tensor: HostTensor) -> None:
    if tensor.dtype in ("float32", "float16", "bfloat16"):
        weight.write_dense(start, np.ascontiguousarray(tensor.data))
        return
    num_rows, cols = tensor.shape
    step = max(1, _CHUNK_VALUES // cols)
    for at in range(0, num_rows, step):
        count = min(step, num_rows - at)
        piece = HostTensor(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=(count, cols),
            data=tensor.data[at : at + count],
            file=tensor.file,
        )
        weight.write_dense(start + at, np.ascontiguousarray(to_float32(piece)))
