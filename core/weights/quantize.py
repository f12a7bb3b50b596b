"""Quantizes dense weights while a checkpoint is read: a ParamSource over another, one tensor at a time.

Weights leave here in the canonical schemes: int8 with a scale for each output or group of columns, int4 and int5 with
a scale and an offset for each group, float8 (e4m3) with a scale for each output. What a platform makes of a scheme is
its own affair (`pack_linear`).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import WeightError
from ..models.params import Param
from .dequantize import row_bytes, to_float32
from .source import HostTensor, LoadedParam, ParamSource

if TYPE_CHECKING:
    from ..platform import Caps

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Codes with scales.

    name: of Caps.schemes. group: columns that share a scale, which then is a float16 number; 0: all of a row.
    is_symmetric: the offset is such that code 8 of 16, or 16 of 32, stands for zero.
    """

    name: str
    group: int = 0
    is_symmetric: bool = True

    @property
    def bits(self) -> int:
        """Of a code."""
        return {"int4": 4, "int5": 5}.get(self.name, 8)


INT8 = Scheme(name="int8")
FP8 = Scheme(name="fp8")
INT8_GROUPS = Scheme(name="int8", group=32)
INT5 = Scheme(name="int5", group=32)
INT5_OFFSETS = Scheme(name="int5", group=32, is_symmetric=False)
INT4: Mapping[str, Scheme] = {
    "int4": Scheme(name="int4", group=32, is_symmetric=False),
    "int4-g64": Scheme(name="int4", group=64, is_symmetric=False),
    "int4-g128": Scheme(name="int4", group=128, is_symmetric=False),
    "int4-sym": Scheme(name="int4", group=32),
}
"""Values of the option `quantize`, beside those of int8, fp8 and none."""
CODES: Mapping[str, str] = {"int8": "int8", "int5": "int5", "int4": "int4", "fp8": "float8_e4m3fn"}
"""The dtype of a scheme's codes."""

Quantizer = Callable[[Floats, Scheme], tuple[npt.NDArray[Any], Floats, Floats | None]]
"""float32 [rows, cols] -> codes [rows, cols], scales and offsets [rows, num_groups]; not finite scales if a value is
not."""

_CHUNK_VALUES = 1 << 22
_CUTS = (0.0, 0.03, 0.08)
"""Fractions of a group's range that are tried to be cut off at each of its ends: steps between become smaller."""
_SHRINKS = (1.06, 1.0, 0.94, 0.88, 0.82, 0.75)
"""Fractions of the range around zero that are tried."""
_NARROW = 1024
"""A hidden size below which a model is small."""
_FITS = 2
"""Times that scale and offset are fitted to the codes that they gave."""


def schemes_of(param: Param, quantization: str, caps: "Caps") -> tuple[tuple[int, Scheme], ...]:
    """How the rows of a parameter are stored, from the first: numbers of rows with their schemes; (): as they are.

    int8 has a scale for each 32 columns, and so have the activations where a device rounds them; with one for a
    whole row (int8-channel) a few large activations leave little of the others. With 4 bits what is sensitive keeps
    8, and so does the table of the vocabulary, from which every token's logits come; int4 is a finer mixture on
    devices that have it all, and on those that keep nothing in integers. Raises WeightError for columns that no group
    divides.
    """
    num_rows = param.shape[0]
    if quantization == "none" or not param.quantizable:
        return ()
    if quantization == "fp8":
        return ((num_rows, FP8),)
    has_groups = quantization != "int8-channel" and param.shape[-1] % INT8_GROUPS.group == 0
    eight_bits = INT8_GROUPS if has_groups else INT8
    if quantization == "int4" and has_groups and (not caps.schemes or "int5" in caps.schemes):
        return _mixture(param)
    if quantization not in INT4 or param.shard == "vocab":
        return ((num_rows, eight_bits),)
    check_columns(param.name, param.shape[-1], INT4[quantization])
    return ((num_rows, eight_bits if param.is_sensitive else INT4[quantization]),)


def _mixture(param: Param) -> tuple[tuple[int, Scheme], ...]:
    """What int4 makes of a parameter: its bits lie where they save most of the error that 4 bits make everywhere.

    v keeps 8 bits. Rounding up_proj, gate_proj, q_proj and k_proj costs less, and down_proj lies between. Small
    models lose more by rounding, so that their layers have a bit more, but for o_proj, which costs least.
    """
    width = param.shape[0] if param.shard == "row" else param.shape[-1]
    is_narrow = width < _NARROW and param.shard in ("row", "column", "vocab")
    if param.shard == "vocab":
        rest = INT8_GROUPS if is_narrow else INT5_OFFSETS
    elif is_narrow and not param.name.endswith("o_proj.weight"):
        rest = INT5
    else:
        rest = INT4["int4" if param.name.endswith("down_proj.weight") else "int4-sym"]
    if not any(part.is_sensitive for part in param.parts):
        return ((param.shape[0], INT8_GROUPS if param.is_sensitive else rest),)
    runs = groupby(param.parts, key=lambda part: part.is_sensitive)
    return tuple((sum(part.rows for part in run), INT8_GROUPS if keeps else rest) for keeps, run in runs)


def packed_bytes(shape: tuple[int, ...], format: str | Scheme) -> int:
    """Bytes of a weight [rows, cols] without padding, in a dtype, a block type or a scheme.

    Raises ValueError for a row that is not a whole number of blocks.
    """
    rows, cols = math.prod(shape[:-1]), shape[-1]
    if isinstance(format, str):
        return rows * row_bytes(format, cols)
    if format.name in ("int8", "fp8"):
        scale_bytes = 2 if format.name == "int8" and format.group else 4
        return rows * (cols + scale_bytes * (cols // (format.group or cols)))
    return rows * (cols * format.bits // 8 + -(-cols // format.group) * (2 if format.is_symmetric else 4))


class QuantizedParams:
    """A ParamSource whose quantizable parameters are quantized when it is their turn."""

    def __init__(
        self, source: ParamSource, quantization: str, caps: "Caps", quantizer: "Quantizer | None" = None
    ) -> None:
        """caps: of the device that the weights are for. quantizer: a faster form of `quantize_rows`."""
        self._source = source
        self._quantization = quantization
        self._caps = caps
        self._quantizer = quantizer or quantize_rows

    def params(self) -> Sequence[Param]:
        """All declarations, in the order of `__iter__`."""
        return self._source.params()

    def __iter__(self) -> Iterator[LoadedParam]:
        """Each parameter once. Raises WeightError for a weight that is quantized already, that no group divides, or
        that holds a NaN or an infinity."""
        for loaded in self._source:
            schemes = schemes_of(loaded.param, self._quantization, self._caps)
            if not schemes:
                yield loaded
                continue
            tensors = tuple(self._quantize(tensor, scheme) for tensor, scheme in _cut(loaded.tensors, schemes))
            yield LoadedParam(param=loaded.param, tensors=tensors)

    def _quantize(self, tensor: HostTensor, scheme: Scheme) -> HostTensor:
        name, file = tensor.name, tensor.file
        if tensor.is_blocked or tensor.scales is not None or tensor.dtype.startswith("float8"):
            raise already_quantized(name, tensor.dtype, file)
        num_rows, cols = tensor.shape
        check_columns(name, cols, scheme, file)  # a part of a row may be what no group divides
        codes = np.empty((num_rows, cols), np.int8 if scheme.name == "int8" else np.uint8)
        quantizer = quantize_rows if scheme == FP8 else self._quantizer
        scales = np.empty((num_rows, cols // scheme.group if scheme.group else 1), np.float32)
        offsets = np.empty_like(scales) if scheme.bits < 8 else None
        step = max(1, _CHUNK_VALUES // cols)
        for start in range(0, num_rows, step):
            part = slice(start, start + step)
            values = np.ascontiguousarray(to_float32(tensor.rows(part)))
            codes[part], scales[part], its_offsets = quantizer(values, scheme)
            if offsets is not None:
                offsets[part] = its_offsets
            if not np.isfinite(scales[part]).all():
                raise not_finite(name, file)
        return replace(tensor, dtype=CODES[scheme.name], data=codes, scales=scales, offsets=offsets)


def _cut(tensors: Sequence[HostTensor], schemes: Sequence[tuple[int, Scheme]]) -> Iterator[tuple[HostTensor, Scheme]]:
    """Pieces of tensors that have one scheme each, and that."""
    rest = iter(schemes)
    left, scheme = next(rest)
    for tensor in tensors:
        start, num_rows = 0, tensor.shape[0]
        while start < num_rows:
            if not left:
                left, scheme = next(rest)
            count = min(left, num_rows - start)
            yield (tensor if count == num_rows else tensor.rows(slice(start, start + count))), scheme
            start, left = start + count, left - count


def check_columns(name: str, cols: int, scheme: Scheme, file: str = "") -> None:
    """Raise WeightError for a weight whose rows are not whole groups."""
    if not scheme.group or cols % scheme.group == 0:
        return
    fitting = [other for other, its in INT4.items() if cols % its.group == 0]
    raise WeightError(
        f"{file}: tensor {name}".removeprefix(": ")
        + f" has {cols} columns, which groups of {scheme.group} do not divide",
        file=file,
        tensor=name,
        remedies=[f"--quantize {other}" for other in (*fitting[:1], "int8")],
    )


def already_quantized(name: str, dtype: str, file: str) -> WeightError:
    """The error for a checkpoint whose weights are not dense."""
    return WeightError(
        f"{file}: tensor {name} is quantized already ({dtype}); quantizing it again would add its errors to those",
        file=file,
        tensor=name,
        remedies=["without --quantize", "the model's checkpoint in bfloat16, float16 or float32"],
    )


def not_finite(name: str, file: str) -> WeightError:
    """The error for a tensor that holds a NaN or an infinity."""
    return WeightError(
        f"{file}: tensor {name} holds a NaN or an infinity",
        file=file,
        tensor=name,
        remedies=["download the model again", "headrace download MODEL"],
    )


def quantize_rows(values: Floats, scheme: Scheme) -> tuple[npt.NDArray[Any], Floats, Floats | None]:
    """The definition of a Quantizer.

    int8: the nearest of 255 levels of a row or group. fp8: the nearest float8 of a row's largest value at 448. int4
    and int5: for several cuts of a group's range, codes by rounding, then scale and offset by least squares for these
    codes, and again; the cut of the smallest squared error is taken. Scales of groups, and offsets, are float16
    numbers.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        groups = values.reshape(-1, scheme.group or values.shape[1])
        if scheme.name == "int8":
            levels, scales = _fit_int8(groups, is_grouped=scheme.group > 0)
            return levels.reshape(values.shape), scales.reshape(len(values), -1), None
        if scheme == FP8:
            scales = np.abs(values).max(1, keepdims=True) / np.float32(448)
            return to_float8(np.divide(values, scales, out=np.zeros_like(values), where=scales > 0)), scales, None
        codes, scales, offsets = (_fit_symmetric if scheme.is_symmetric else _fit)(groups, scheme.bits)
        shape = len(values), values.shape[1] // scheme.group
        return codes.reshape(values.shape), scales.reshape(shape), offsets.reshape(shape)


def to_float8(x: Floats) -> npt.NDArray[np.uint8]:
    """The bits of the float8_e4m3fn nearest to each value, halves to even; what is larger than 448 becomes that.

    Times 2^-120 the exponents are those of float8, also where steps no longer shrink: there float32 has none either.
    """
    bits = (np.abs(x) * np.float32(2.0**-120)).view(np.uint32)
    bits = np.minimum((bits + np.uint32(0x7FFFF) + ((bits >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20), 0x7E)
    signed: npt.NDArray[np.uint8] = np.where(np.signbit(x), bits | 0x80, bits).astype(np.uint8)
    return signed


def _fit_int8(x: Floats, *, is_grouped: bool) -> tuple[npt.NDArray[np.int8], Floats]:
    """Codes [n, group] and scales [n, 1] of groups [n, group]."""
    highest = np.abs(x).max(1, keepdims=True)
    scales = highest / np.float32(127)
    if is_grouped:
        scales = _half(scales)
    levels = np.divide(x, scales, out=np.zeros_like(x), where=scales > 0)
    return np.clip(np.rint(levels, out=levels), -127, 127).astype(np.int8), scales


def _fit(x: Floats, bits: int) -> tuple[npt.NDArray[np.uint8], Floats, Floats]:
    """Codes [n, group], scales and offsets [n, 1] of groups [n, group]."""
    low, extent = x.min(1, keepdims=True), np.ptp(x, 1, keepdims=True)
    total, top = x.sum(1, keepdims=True), (1 << bits) - 1
    best: list[Floats] = []
    for below, above in product(_CUTS, _CUTS):
        scale = _half(extent * np.float32(1 - below - above) / np.float32(top))
        offset = _half(low + extent * np.float32(below))
        for _ in range(_FITS):
            codes = _encode(x, scale, offset, top)
            sum_1, sum_2 = codes.sum(1, keepdims=True), (codes * codes).sum(1, keepdims=True)
            products = (codes * x).sum(1, keepdims=True)
            spread = x.shape[1] * sum_2 - sum_1 * sum_1
            slope = np.divide(x.shape[1] * products - sum_1 * total, spread, out=scale.copy(), where=spread > 0)
            scale = _half(np.where(slope > 0, slope, scale))
            offset = _half((total - scale * sum_1) / x.shape[1])
        best = _better(best, x, scale, offset, top)
    return _encode(x, best[1], best[2], top).astype(np.uint8), best[1], best[2]


def _fit_symmetric(x: Floats, bits: int) -> tuple[npt.NDArray[np.uint8], Floats, Floats]:
    """As `_fit` with offset = -middle * scale; the scale's sign is such that -middle lies at the group's largest
    value."""
    largest = np.take_along_axis(x, np.abs(x).argmax(1)[:, None], 1)
    middle, top = np.float32(1 << (bits - 1)), (1 << bits) - 1
    best: list[Floats] = []
    for sign, shrink in product((-1.0, 1.0), _SHRINKS):
        scale = _half(largest * np.float32(sign * shrink) / middle)
        for _ in range(_FITS):
            codes = _encode(x, scale, -(scale * middle), top) - middle
            squares = (codes * codes).sum(1, keepdims=True)
            products = (codes * x).sum(1, keepdims=True)
            scale = _half(np.divide(products, squares, out=scale.copy(), where=squares > 0))
        best = _better(best, x, scale, -(scale * middle), top)
    return _encode(x, best[1], best[2], top).astype(np.uint8), best[1], best[2]


def _encode(x: Floats, scale: Floats, offset: Floats, top: int) -> Floats:
    """Codes in [0, top] as float32."""
    levels: Floats = np.divide(x - offset, scale, out=np.zeros_like(x), where=scale != 0)
    np.clip(np.rint(levels, out=levels), 0, top, out=levels)
    return levels


def _better(best: list[Floats], x: Floats, scale: Floats, offset: Floats, top: int) -> list[Floats]:
    """(squared error, scale, offset) of each group, the better of two."""
    difference = _encode(x, scale, offset, top) * scale + offset - x
    found = [(difference * difference).sum(1, keepdims=True), scale, offset]
    if not best:
        return found
    is_better = found[0] < best[0]
    return [np.where(is_better, new, old) for new, old in zip(found, best, strict=True)]


def _half(values: Floats) -> Floats:
    rounded: Floats = values.astype(np.float16).astype(np.float32)
    return rounded
