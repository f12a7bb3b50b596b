"""Checkpoints that were quantized before: each weight out of the tensors that stand for it, when it is its turn."""

import functools
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import ModelError, WeightError
from ..models.params import Param
from ..suggest import did_you_mean
from . import formats
from .dequantize import to_float32
from .load import is_in_place
from .names import NameTable
from .quantize import INT4, INT8, INT8_GROUPS, Scheme
from .source import HostTensor, TensorInfo, WeightSource

Read = Callable[[str], HostTensor]
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
"""Values of float4_e2m1fn."""
_KEPT_GROUPS = frozenset(scheme.group for scheme in INT4.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One weight. stored: the tensors that it is made of; shapes: those that some of these must have; decode: makes
    it, in float32, bfloat16 or as codes."""

    name: str
    shape: tuple[int, ...]
    stored: tuple[str, ...]
    decode: Callable[[Read], HostTensor]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class Format(Protocol):
    """A file of formats/, called as `quant_method` in config.json calls it.

    It may have `scheme(config) -> Scheme | None`, too: what weights stay in, as far as the config tells.
    """

    def check(self, config: Mapping[str, Any]) -> str:
        """Why a model with this quantization_config is not read, or ""."""
        ...

    def find(self, source: WeightSource, config: Mapping[str, Any]) -> Iterable[Weight]:
        """The quantized weights of a checkpoint. Tensors that are in none of them are as they are."""
        ...


IGNORED = (".input_scale", ".input_zero_point", ".input_global_scale", ".k_scale", ".v_scale", ".output_scale")
"""Ends of names of scales for rounded activations and caches, which are not rounded here."""


class DecodedSource:
    """A WeightSource over another. keep_codes: leave a weight in integers where devices have kernels for such."""

    def __init__(self, source: WeightSource, config: Mapping[str, Any], *, keep_codes: bool) -> None:
        """config: the quantization_config, for which `check_quantization` found nothing. Raises WeightError."""
        self._source, self._keep_codes = source, keep_codes
        names = set(source.names())
        found = tuple(_format(str(config["quant_method"])).find(source, config))
        for weight in found:
            for name in weight.stored:
                if name not in names:
                    file = source.info(next(part for part in weight.stored if part in names)).file
                    raise WeightError(f"{file}: {weight.name} lacks {name}", file=file, tensor=name)
            for name, shape in weight.shapes.items():
                if (info := source.info(name)).shape != shape:
                    reason = f"{info.file}: {name} is {list(info.shape)}, but {weight.name} takes {list(shape)}"
                    raise WeightError(reason, file=info.file, tensor=name)
        self._weights = {weight.name: weight for weight in found}
        used = {name: weight.name for weight in found for name in weight.stored}
        self._names = tuple(
            dict.fromkeys(used.get(name, name) for name in source.names() if not name.endswith(IGNORED))
        )

    def names(self) -> Sequence[str]:
        """Names of weights and of all other tensors."""
        return self._names

    def info(self, name: str) -> TensorInfo:
        """Index entry of one tensor; of a weight, that of the numbers that it stands for."""
        weight = self._weights.get(name)
        if weight is None:
            return self._source.info(name)
        infos = [self._source.info(part) for part in weight.stored]
        num_bytes = sum(info.num_bytes for info in infos)
        return TensorInfo(name=name, dtype="float32", shape=weight.shape, file=infos[0].file, num_bytes=num_bytes)

    def read(self, name: str) -> HostTensor:
        """One tensor. Raises WeightError that names file and tensor."""
        weight = self._weights.get(name)
        if weight is None:
            return self._source.read(name)
        file = self._source.info(weight.stored[0]).file
        try:
            tensor = replace(weight.decode(self._source.read), name=name, file=file)
        except (ValueError, IndexError, KeyError) as error:  # numpy's, for parts that do not fit each other
            raise WeightError(f"{file}: {name} is damaged: {error}", file=file, tensor=name) from error
        assert tensor.shape == weight.shape, f"{name} is {tensor.shape}, declared {weight.shape}"
        return tensor if self._keep_codes else dense(tensor)

    def close(self) -> None:
        """Close the checkpoint."""
        self._source.close()


def check_quantization(config: Mapping[str, Any], file: str) -> None:
    """Raises ModelError for a quantization_config that is not read."""
    method = str(config.get("quant_method"))
    known = format_names()
    if method.replace("-", "_") not in known:
        why = f"{did_you_mean(method, known)}; read are {', '.join(known)}, and GGUF files"
    else:
        why = _format(method).check(config)
    if why:
        raise ModelError(
            f"{file} describes weights quantized by {method!r}, which cannot be read here: {why.removeprefix('; ')}",
            remedies=["take the unquantized model", "take a .gguf file of the model"],
        )


def format_names() -> tuple[str, ...]:
    """Every quant_method that is read, sorted."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(formats.__path__)))


def kept_scheme(param: Param, config: Mapping[str, Any], table: NameTable) -> Scheme | None:
    """What a parameter of such a checkpoint stays in; None: it is dense. No weight is looked at."""
    find = getattr(_format(str(config["quant_method"])), "scheme", None)
    scheme: Scheme | None = find(config) if find is not None else None
    if scheme is None or not param.quantizable or param.kind == "embedding":
        return None
    if param.shard == "vocab" and config["quant_method"] != "compressed-tensors" and not config.get("lm_head"):
        return None
    entries = [table.entry(name) for name in (param.name, *(part.name for part in param.parts))]
    are_kept = any(entries) and not any(
        entry and (not is_in_place(entry, param) or _is_left_out((entry.name, *entry.also), config))
        for entry in entries
    )
    return scheme if are_kept and (not scheme.group or param.shape[-1] % scheme.group == 0) else None


def _is_left_out(names: Sequence[str], config: Mapping[str, Any]) -> bool:
    """True for a weight, by its spellings, of a module that the config says was not quantized."""
    patterns = [
        p for key in ("modules_to_not_convert", "llm_int8_skip_modules", "ignore") for p in config.get(key) or ()
    ]
    for module in (name.removesuffix(".weight") for name in names):
        for pattern in patterns:
            if pattern.startswith("re:"):
                if re.match(pattern.removeprefix("re:"), module):
                    return True
            elif f".{pattern}." in f".{module}.":
                return True
    return False


# ---- for formats ------------------------------------------------------------------------------------------
def from_values(values: npt.NDArray[np.float32]) -> HostTensor:
    """A weight in float32."""
    return HostTensor(name="", dtype="float32", shape=values.shape, data=values)


def scheme_of_codes(bits: int, group: int, *, is_symmetric: bool) -> Scheme | None:
    """What `from_codes` leaves such codes in. group: below 1 for a whole row."""
    if bits == 4 and group in _KEPT_GROUPS:
        return Scheme(name="int4", group=group, is_symmetric=is_symmetric)
    if bits == 8 and is_symmetric:
        return INT8 if group < 1 else INT8_GROUPS if group == INT8_GROUPS.group else None
    return None


def from_codes(
    codes: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.float32],
    zeros: npt.NDArray[Any] | None,
    bits: int,
) -> HostTensor:
    """A weight from unsigned codes [rows, cols]: (code - zero) * scale. scales, zeros: [rows, num_groups]; zeros
    None: half of the range.

    It stays in integers if these are of a scheme of `weights.quantize`; else it becomes float32.
    """
    rows, cols = codes.shape
    group = cols // scales.shape[1]
    if group * scales.shape[1] != cols:
        raise ValueError(f"{cols} columns in {scales.shape[1]} groups")
    middle = 1 << (bits - 1)
    offsets = -scales * (np.float32(middle) if zeros is None else zeros.astype(np.float32))
    fits_half = bool((scales.astype(np.float16) == scales).all()) and bool((np.abs(offsets) < 65504).all())
    if bits == 8 and (group == cols or (group == 32 and fits_half)) and (zeros is None or (zeros == middle).all()):
        signed = (codes ^ np.uint8(0x80)).view(np.int8)
        return HostTensor(name="", dtype="int8", shape=codes.shape, data=signed, scales=scales)
    if bits == 4 and group in _KEPT_GROUPS and fits_half:
        return HostTensor(name="", dtype="int4", shape=codes.shape, data=codes, scales=scales, offsets=offsets)
    values = codes.astype(np.float32).reshape(rows, -1, group)
    values -= np.float32(middle) if zeros is None else zeros.astype(np.float32)[..., None]
    values *= scales[..., None]
    return from_values(values.reshape(codes.shape))


def from_float8(codes: HostTensor, scales: npt.NDArray[np.float32], block: Sequence[int] = ()) -> HostTensor:
    """A weight from float8 [..., rows, cols] with scales as `scale_blocks` takes them. A matrix of e4m3fn whose rows
    are whole runs of columns with one scale stays in float8; else it becomes float32."""
    if codes.dtype == "float8_e4m3fn" and len(codes.shape) == 2:
        rows, cols = codes.shape
        num_groups = scales.shape[-1] if scales.ndim == 2 else 1
        ones = np.ones((rows, num_groups), np.float32)
        size = (block[0], 1) if len(block) == 2 and num_groups == -(-cols // block[1]) else ()
        if cols % num_groups == 0 and (not size or cols // num_groups == block[1]):
            kept = np.ascontiguousarray(scale_blocks(ones, scales, size))
            return HostTensor(name="", dtype=codes.dtype, shape=codes.shape, data=codes.data, scales=kept)
    return from_values(scale_blocks(to_float32(codes), scales, block))


def dense(tensor: HostTensor) -> HostTensor:
    """The tensor without codes."""
    if tensor.scales is None:
        return tensor
    return replace(tensor, dtype="float32", data=to_float32(tensor), scales=None, offsets=None)


def unpack(words: npt.NDArray[Any], bits: int, order: Sequence[int] = ()) -> npt.NDArray[np.uint8]:
    """Codes of `bits` (a divisor of 8) out of words of any size, the lowest bits first, along the last axis.

    order: where in a word's codes the i-th of them belongs.
    """
    num_codes = words.dtype.itemsize * 8 // bits
    unsigned = np.ascontiguousarray(words).view(f"u{words.dtype.itemsize}")
    codes = np.empty((*words.shape, num_codes), np.uint8)
    for i in range(num_codes):
        place = order[i] if order else i
        codes[..., place] = (unsigned >> (bits * i)) & ((1 << bits) - 1)
    return codes.reshape(*words.shape[:-1], words.shape[-1] * num_codes)


def scale_blocks(
    values: npt.NDArray[np.float32], scales: npt.NDArray[np.float32], block: Sequence[int] = ()
) -> npt.NDArray[np.float32]:
    """values [..., rows, cols] times scales: one number, or [..., row blocks, column blocks] of the size `block`, or
    of equal sizes if it is not given. Changes and returns `values`."""
    if scales.size == 1:
        values *= scales.reshape(())
        return values
    if scales.ndim == values.ndim - 1:
        scales = scales[..., None]
    rows, cols = values.shape[-2:]
    counts = scales.shape[-2:]
    if len(block) != 2 or counts != (-(-rows // block[0]), -(-cols // block[1])):
        block = (rows // counts[0], cols // counts[1])
        if (block[0] * counts[0], block[1] * counts[1]) != (rows, cols):
            raise ValueError(f"{list(counts)} scales for {rows} rows of {cols}")
    wide = np.repeat(scales, block[0], axis=-2)[..., :rows, :]
    values *= wide if counts[1] == 1 else np.repeat(wide, block[1], axis=-1)[..., :cols]
    return values


def group_shapes(
    source: WeightSource, base: str, config: Mapping[str, Any], num_in: int, num_out: int, bits: int
) -> dict[str, tuple[int, ...]]:
    """Shapes of `scales` and `qzeros` beside a GPTQ's or AWQ's codes: a row for each group of inputs, as many as the
    config says, or else as there are scales for."""
    scales, zeros = f"{base}.scales", f"{base}.qzeros"
    if not {scales, zeros} <= set(source.names()):
        return {}
    group = None if config.get("dynamic") else config.get("group_size", config.get("q_group_size"))
    if group is None:  # or each module has its own
        num_groups = source.info(scales).shape[0]
    else:
        num_groups = -(-num_in // group) if group > 0 else 1
    return {scales: (num_groups, num_out), zeros: (num_groups, num_out * bits // 32)}


def named(source: WeightSource, *ends: str) -> Iterable[tuple[str, str]]:
    """(beginning, end) of each name with one of the ends."""
    for name in source.names():
        for end in ends:
            if name.endswith(end):
                yield name.removesuffix(end), end


@functools.cache
def _format(method: str) -> Format:
    module: Any = importlib.import_module(f"{formats.__name__}.{method.replace('-', '_')}")
    return module  # type: ignore[no-any-return]
