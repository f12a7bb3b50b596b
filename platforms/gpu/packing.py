"""Weights on their way to a GPU: 8 and 4 bits stay so, in the layout of the Triton kernels."""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headrace.core.ops import OpTable
from headrace.core.stages import Array
from headrace.core.weights.quantize import CODES, Scheme
from headrace.core.weights.source import HostTensor

if TYPE_CHECKING:
    import torch

SCHEMES = ("int8", "int4", "fp8")
_SCHEME_OF = {codes: scheme for scheme, codes in CODES.items()}

_MINUS_ZERO = 0x80
"""What e4m3fnuz has its NaN for."""


def packed_bytes(shape: tuple[int, ...], scheme: Scheme) -> int:
    """Bytes of a weight [rows, cols] in one of SCHEMES."""
    from headrace.kernels.triton.quantized import row_width

    rows, cols = math.prod(shape[:-1]), shape[-1]
    codes = row_width(cols, 4 if scheme.name == "int4" else 8, scheme.group)
    if not scheme.group or scheme.name == "fp8":
        return rows * (codes + 4 * (cols // (scheme.group or cols)))
    has_offsets = scheme.name == "int4" and not scheme.is_symmetric
    return rows * (codes + cols // scheme.group * (4 if has_offsets else 2))


def pack_linear(tensors: Sequence[HostTensor], *, dtype: str, device: str, float8: str = "") -> Array:
    """As core/ops/packed.py: a QuantizedWeight where all parts have codes of one scheme, else a dense tensor.

    float8: the kind that the GPU multiplies, if any; e4m3fnuz is another than a checkpoint's.
    """
    scheme = _common_scheme(tensors)
    if scheme is None:
        return OpTable.pack_linear(tensors, dtype=dtype, device=device)
    import torch

    from headrace.kernels.triton.quantized import QuantizedWeight, row_width

    bits, in_features = 4 if scheme.name == "int4" else 8, tensors[0].shape[1]
    is_fnuz = scheme.name == "fp8" and float8 == "e4m3fnuz"
    shape = sum(len(tensor.data) for tensor in tensors), row_width(in_features, bits, scheme.group)
    codes = torch.empty(shape, dtype=torch.int8 if scheme.name == "int8" else torch.uint8, device=device)
    start = 0
    for tensor in tensors:
        data = tensor.data if bits == 8 else _nibbles(tensor.data, shape[1])
        if is_fnuz:
            data = np.where(data == _MINUS_ZERO, 0, data).astype(np.uint8)
        codes[start : start + len(data)].copy_(torch.from_numpy(np.require(data, requirements=("C", "W"))))
        start += len(data)
    scale_dtype = np.float16 if scheme.group and scheme.name != "fp8" else np.float32
    scales = _by_group([tensor.scales for tensor in tensors], scale_dtype).to(device)
    if is_fnuz:
        scales *= 2  # the same bits stand for half the value
    offsets = None
    if not scheme.is_symmetric:
        offsets = _by_group([tensor.offsets for tensor in tensors], scale_dtype).to(device)
    return QuantizedWeight(
        codes=codes,
        scales=scales,
        offsets=offsets,
        in_features=in_features,
        group=scheme.group,
        bits=bits,
        dtype=getattr(torch, dtype),
        is_fnuz=is_fnuz,
    )


def pack_stacked(
    tensors: Sequence[HostTensor], *, num_stacked: int, dtype: str, device: str, float8: str = ""
) -> Array:
    """As core/ops/moe.py: a QuantizedWeight of all matrices, or [num_stacked, rows, cols]. float8: as above."""
    import torch

    weight = pack_linear(tensors, dtype=dtype, device=device, float8=float8)
    if isinstance(weight, torch.Tensor):
        return weight.view(num_stacked, -1, weight.shape[-1])
    return dataclasses.replace(weight, num_stacked=num_stacked)


def _common_scheme(tensors: Sequence[HostTensor]) -> Scheme | None:
    """The scheme of all tensors; None if they have none, several, or one that the kernels do not take."""
    [first, *_] = tensors
    if any(tensor.scales is None or tensor.dtype != first.dtype for tensor in tensors):
        return None
    assert all((tensor.offsets is not None) == (tensor.dtype == "int4") for tensor in tensors), "see HostTensor"
    group, in_features = first.group, first.shape[1]
    if any(tensor.group != group for tensor in tensors):
        return None
    if first.dtype in ("int8", "float8_e4m3fn") and group == in_features:
        return Scheme(name=_SCHEME_OF[first.dtype])
    if first.dtype not in _SCHEME_OF or group < 16 or group & (group - 1):
        return None
    is_symmetric = first.dtype != "int4" or all(map(_is_symmetric, tensors))
    return Scheme(name=_SCHEME_OF[first.dtype], group=group, is_symmetric=is_symmetric)


def _is_symmetric(tensor: HostTensor) -> bool:
    """True if code 8 stands for zero everywhere."""
    assert tensor.scales is not None and tensor.offsets is not None
    return np.array_equal(tensor.offsets, -8 * tensor.scales)


def _nibbles(codes: npt.NDArray[Any], width: int) -> npt.NDArray[np.uint8]:
    """Codes [rows, cols] as bytes [rows, width]: the first `width` columns in the low halves."""
    packed = codes[:, :width].astype(np.uint8)
    packed[:, : codes.shape[1] - width] |= codes[:, width:] << np.uint8(4)
    return packed


def _by_group(values: Sequence[Any], dtype: type[np.floating[Any]]) -> "torch.Tensor":
    """Scales or offsets of stacked tensors, [num_groups, rows] with the rows side by side."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(np.concatenate(values).T.astype(dtype)))
