"""Any host tensor as float32, and how many bytes a row of any dtype takes."""

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import WeightError
from .block_types import BLOCK_TYPES, BlockType
from .source import DTYPE_BYTES, HostTensor

_CHUNK_VALUES = 1 << 17
"""Values converted at once: the temporaries of a chunk stay in the CPU's cache and small beside any tensor."""


def to_float32(tensor: HostTensor) -> npt.NDArray[np.float32]:
    """The tensor's values, float32 [*shape].

    A float32 tensor comes back as its own data, which may be a read-only view; everything else is a new array.
    float64 and integers are rounded to nearest. Raises WeightError for a block type without a definition here.
    """
    if tensor.scales is not None:
        return _from_codes(tensor, tensor.scales)
    if tensor.dtype == "float32":
        return tensor.data.reshape(tensor.shape)
    if tensor.is_blocked:
        return _from_blocks(tensor, _block_type(tensor))
    out = np.empty(tensor.shape, dtype=np.float32)
    data, flat = tensor.data.reshape(-1), out.reshape(-1)
    for start in range(0, len(flat), _CHUNK_VALUES):
        chunk = slice(start, start + _CHUNK_VALUES)
        _convert(tensor.dtype, data[chunk], flat[chunk])
    return out


def row_bytes(dtype: str, num_values: int) -> int:
    """Bytes of a row of `num_values` in a dtype or block type.

    Raises ValueError if there is no such dtype or the row is not a whole number of blocks.
    """
    if dtype in DTYPE_BYTES:
        return num_values * DTYPE_BYTES[dtype]
    block = BLOCK_TYPES.get(dtype)
    if block is None:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join((*DTYPE_BYTES, *BLOCK_TYPES))}")
    if num_values % block.num_values:
        raise ValueError(
            f"a row of {num_values} values is not a whole number of {dtype} blocks of {block.num_values}"
        )
    return num_values // block.num_values * block.num_bytes


def _block_type(tensor: HostTensor) -> BlockType:
    block = BLOCK_TYPES.get(tensor.dtype)
    if block is None or block.dequantize is None:
        readable = ", ".join(name for name, known in BLOCK_TYPES.items() if known.dequantize)
        raise WeightError(
            f"{tensor.file}: tensor {tensor.name} has block type {tensor.dtype}, which cannot be read here; "
            f"readable block types: {readable}",
            file=tensor.file,
            tensor=tensor.name,
            remedies=("use a file of the same model quantized to a readable type, such as Q4_K_M or Q8_0",),
        )
    return block


def _from_blocks(tensor: HostTensor, block: BlockType) -> npt.NDArray[np.float32]:
    assert block.dequantize is not None, "checked by _block_type"
    blocks = tensor.data.reshape(-1, block.num_bytes)
    out = np.empty((len(blocks), block.num_values), dtype=np.float32)
    step = max(1, _CHUNK_VALUES // block.num_values)
    # Damaged scales may be infinite; whether a weight may be is for the caller to judge, without warnings here.
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(blocks), step):
            out[start : start + step] = block.dequantize(blocks[start : start + step])
    return out.reshape(tensor.shape)


def _from_codes(tensor: HostTensor, scales: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    values = np.empty(tensor.data.size, np.float32)
    _convert(tensor.dtype, tensor.data.reshape(-1), values)
    values = values.reshape(*scales.shape, -1)
    values *= scales[..., None]
    if tensor.offsets is not None:
        values += tensor.offsets[..., None]
    return values.reshape(tensor.shape)


def _convert(dtype: str, data: npt.NDArray[Any], out: npt.NDArray[np.float32]) -> None:
    """Write `data`, of a plain dtype, into `out`; both [n]."""
    if dtype == "bfloat16":
        np.left_shift(data, np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)
    elif dtype == "float8_e4m3fn":
        np.take(_E4M3, data, out=out)
    elif dtype == "float8_e5m2":
        # e5m2 is the upper byte of a float16.
        out[:] = (data.astype(np.uint16) << np.uint16(8)).view(np.float16)
    else:
        with np.errstate(over="ignore"):
            out[:] = data


def _e4m3_values() -> npt.NDArray[np.float32]:
    """All 256 values of float8_e4m3fn: exponent bias 7, no infinity, NaN only at mantissa and exponent all ones."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    values = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8.0 + mantissa, exponent - 10))
    values[code & 127 == 127] = np.nan
    return np.asarray(np.where(code < 128, values, -values), dtype=np.float32)


_E4M3 = _e4m3_values()
