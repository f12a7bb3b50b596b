"""Packs declared parameters into the layouts of the native kernels, part by part, without torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.config import DTYPES
from headrace.core.weights.block_types import iq4_nl_as_q8_0
from headrace.core.weights.dequantize import to_float32
from headrace.core.weights.quantize import Scheme, not_finite
from headrace.core.weights.source import HostTensor, LoadedParam
from headrace.kernels.cpu import _ops

BLOCK_FORMATS = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k")
"""GGUF block types that the kernels multiply as they stand."""
KEPT_BLOCKS = (*BLOCK_FORMATS, "iq4_nl")
"""Those whose values the kernels' blocks hold."""
HALVES = ("bfloat16", "float16")
"""Dtypes that the kernels widen as they read, which gives the bits of float32 at half its bytes."""
SCHEMES = (*KEPT_BLOCKS, *HALVES, "int8", "int5", "int4")
STORED_DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "uint16"}
"""What numpy calls the dtypes of activations."""
_CHUNK_VALUES = 1 << 22
_BLOCK = 32
"""Columns of a block, which share a scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a weight is packed as. group: of format int4."""

    format: "_ops.Format"
    group: int = 0

    @property
    def rounds_x(self) -> bool:
        """True if products round each 32 activations to 8 bits, which lets integers do the work."""
        return self.format in (*BLOCK_FORMATS, "int4")


def choose_layout(tensors: Sequence[HostTensor], dtype: str, *, keep_blocks: bool) -> Layout:
    """The layout of a stacked parameter: its own scheme, or its own blocks or halves if they may be kept, if all
    parts have the same; else dense numbers."""
    if len({(tensor.dtype, tensor.offsets is None) for tensor in tensors}) == 1:
        [first, *_] = tensors
        if first.scales is not None and first.dtype in ("int8", "int5", "int4"):
            is_whole_row = first.dtype == "int8" and first.group == first.shape[1]
            group = 0 if is_whole_row else first.group
            scheme = Scheme(name=first.dtype, group=group, is_symmetric=_is_symmetric(tensors))
            if all(tensor.group == first.group for tensor in tensors):
                return layout_of(scheme)
        elif keep_blocks and is_kept(first.dtype, dtype):
            return layout_of(first.dtype)
    return layout_of(dtype)


def is_kept(stored: str, dtype: str) -> bool:
    """True if a weight may stay as a checkpoint has it while activations are `dtype`."""
    return stored in KEPT_BLOCKS or (dtype == "float32" and stored in HALVES)


def layout_of(format: str | Scheme) -> Layout:
    """The layout of a dtype, a block type or a scheme. Groups of 32 are blocks: scales are float16 numbers."""
    if isinstance(format, str):
        format = "q8_0" if format == "iq4_nl" else format  # which holds its values without loss
        return Layout(format=format)  # type: ignore[arg-type]
    if format.name == "int8":
        return Layout(format="q8_0" if format.group else "int8")
    if format.name == "int5":
        return Layout(format="q5_0" if format.is_symmetric else "q5_1")
    if format.group == _BLOCK:
        return Layout(format="q4_0" if format.is_symmetric else "q4_1")
    return Layout(format="int4", group=format.group)


def packed_bytes(shape: tuple[int, ...], format: str | Scheme) -> int:
    """Bytes of a packed weight."""
    layout = layout_of(format)
    return _ops.packed_bytes(layout.format, math.prod(shape[:-1]), shape[-1], layout.group)


def pack(tensors: Sequence[HostTensor], dtype: str, *, keep_blocks: bool) -> tuple[_ops.PackedWeight, Layout]:
    """One packed weight from parts stacked along their rows, each [rows, in_features].

    A part that is kept neither in its scheme nor as blocks goes through float32 in pieces of at most 16 MiB.
    """
    layout = choose_layout(tensors, dtype, keep_blocks=keep_blocks)
    rows = sum(tensor.shape[0] for tensor in tensors)
    weight = _ops.PackedWeight(layout.format, rows, tensors[0].shape[1], layout.group)
    start = 0
    for tensor in tensors:
        write(weight, layout, start, tensor)
        start += tensor.shape[0]
    return weight, layout


def write(weight: _ops.PackedWeight, layout: Layout, start: int, tensor: HostTensor) -> None:
    """Write rows of a packed weight from `start` on. Raises WeightError for a NaN or an infinity."""
    if tensor.scales is not None and layout.format not in DTYPES:
        _write_codes(weight, start, tensor, tensor.scales, layout)
    elif tensor.dtype == "iq4_nl" and layout.format == "q8_0":
        weight.write_blocks(start, iq4_nl_as_q8_0(np.ascontiguousarray(tensor.data)))
    elif layout.format in BLOCK_FORMATS:
        weight.write_blocks(start, np.ascontiguousarray(tensor.data))
    else:
        _write_dense(weight, start, tensor)


def quantize_rows(
    values: npt.NDArray[np.float32], scheme: Scheme
) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32], npt.NDArray[np.float32] | None]:
    """As `core.weights.quantize.quantize_rows`, on all threads."""
    has_offsets = scheme.bits < 8
    codes: npt.NDArray[Any] = np.empty(values.shape, np.uint8 if has_offsets else np.int8)
    scales = np.empty((len(values), values.shape[1] // (scheme.group or values.shape[1])), np.float32)
    offsets = np.empty_like(scales) if has_offsets else None
    _ops.quantize(codes, scales, offsets, values, scheme.is_symmetric, scheme.bits if has_offsets else 4)
    return codes, scales, offsets


def vector(loaded: LoadedParam) -> npt.NDArray[np.float32]:
    """A parameter that is not packed, as float32, its parts joined."""
    values = np.concatenate([to_float32(tensor) for tensor in loaded.tensors])
    if not np.isfinite(values).all():
        raise not_finite(loaded.param.name, loaded.tensors[0].file)
    return values


def _is_symmetric(tensors: Sequence[HostTensor]) -> bool:
    """True if the middle of the codes stands for zero everywhere."""
    return all(
        tensor.offsets is not None
        and tensor.scales is not None
        and bool((tensor.offsets == (-16 if tensor.dtype == "int5" else -8) * tensor.scales).all())
        for tensor in tensors
    )


def _write_codes(
    weight: _ops.PackedWeight, start: int, tensor: HostTensor, scales: npt.NDArray[np.float32], layout: Layout
) -> None:
    if layout.format == "int8":
        weight.write_int8(start, tensor.data, np.ascontiguousarray(scales[:, 0]))
        return
    if layout.format == "int4":
        assert tensor.offsets is not None
        weight.write_int4(start, tensor.data, scales, tensor.offsets)
        return
    if layout.format == "q8_0":
        groups = np.empty((*scales.shape, 2 + _BLOCK), np.uint8)
        groups[..., :2] = scales.astype(np.float16)[..., None].view(np.uint8)
        groups[..., 2:] = tensor.data.reshape(*scales.shape, _BLOCK).view(np.uint8)
        weight.write_blocks(start, groups.reshape(len(groups), -1))
        return
    # As blocks of a GGUF file: scale, offset if there is one, fifth bits if there are (of code k in bit k), then the
    # first half of the codes in the low nibbles.
    codes = tensor.data.reshape(*scales.shape, _BLOCK)
    has_offsets, has_fifth = layout.format in ("q4_1", "q5_1"), tensor.dtype == "int5"
    fifth = 4 if has_offsets else 2
    head = fifth + 4 * has_fifth
    blocks = np.empty((*scales.shape, head + _BLOCK // 2), np.uint8)
    blocks[..., :2] = scales.astype(np.float16)[..., None].view(np.uint8)
    if has_offsets and tensor.offsets is not None:
        blocks[..., 2:4] = tensor.offsets.astype(np.float16)[..., None].view(np.uint8)
    if has_fifth:
        blocks[..., fifth:head] = np.packbits(codes >> 4, axis=-1, bitorder="little")
    np.left_shift(codes[..., _BLOCK // 2 :], 4, out=blocks[..., head:])
    blocks[..., head:] |= codes[..., : _BLOCK // 2] & 15
    weight.write_blocks(start, blocks.reshape(len(codes), -1))


def _write_dense(weight: _ops.PackedWeight, start: int, tensor: HostTensor) -> None:
    num_rows, cols = tensor.shape
    is_dense = tensor.dtype in ("float32", "float16", "bfloat16")
    step = num_rows if is_dense else max(1, _CHUNK_VALUES // cols)
    for at in range(0, num_rows, step):
        rows = tensor.rows(slice(at, at + step))
        data = np.ascontiguousarray(rows.data if is_dense else to_float32(rows))
        try:
            weight.write_dense(start + at, data)
        except ValueError as error:  # the shapes fit, so it is a value
            raise not_finite(tensor.name, tensor.file) from error
