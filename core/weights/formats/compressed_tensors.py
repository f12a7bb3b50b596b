"""What llm-compressor writes: integers and floats of 4 and 8 bits, by row, group or block (compressed-tensors)."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from ..decoded import (
    FP4,
    Read,
    Weight,
    from_codes,
    from_float8,
    from_values,
    named,
    scale_blocks,
    scheme_of_codes,
    unpack,
)
from ..dequantize import to_float32
from ..quantize import Scheme
from ..source import HostTensor, WeightSource

_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
)


def check(config: Mapping[str, Any]) -> str:
    """No sparsity, no rotations."""
    kind = config.get("format")
    if kind not in _FORMATS:
        return f"format must be one of {', '.join(_FORMATS)}, got {kind!r}"
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        return f"weights are sparse ({sparsity})"
    return "weights are rotated (transform_config)" if config.get("transform_config") else ""


def scheme(config: Mapping[str, Any]) -> Scheme | None:
    """Integers with scales by row or group, the same in all groups of layers."""
    found = set()
    for layers in (config.get("config_groups") or {}).values():
        weights = layers.get("weights") or {}
        by_group = weights.get("strategy") == "group"
        if weights.get("type", "int") != "int" or not (by_group or weights.get("strategy") == "channel"):
            return None
        if weights.get("actorder") == "group":
            return None
        group = weights.get("group_size") if by_group else None
        is_symmetric = bool(weights.get("symmetric", True))
        found.add(scheme_of_codes(weights.get("num_bits", 8), group or 0, is_symmetric=is_symmetric))
    return found.pop() if len(found) == 1 else None


def find(source: WeightSource, config: Mapping[str, Any]) -> Iterator[Weight]:
    """By what lies beside a weight: NAME_packed is words of codes, or pairs of four-bit floats; else NAME_scale."""
    names = set(source.names())
    for base, end in named(source, ".weight_packed"):
        info, weight = source.info(base + end), f"{base}.weight"
        if info.dtype == "uint8":
            whole = [name for name in (f"{weight}_global_scale",) if name in names]
            floats = (base + end, f"{weight}_scale", *whole)
            shape = (info.shape[0], info.shape[1] * 2)
            yield Weight(name=weight, shape=shape, stored=floats, decode=partial(decode_fp4, floats, True))
            continue
        parts = [weight + part for part in ("_zero_point", "_g_idx") if weight + part in names]
        stored = (base + end, f"{weight}_scale", f"{weight}_shape", *parts)
        rows, cols = (int(size) for size in source.read(f"{weight}_shape").data)
        decode = partial(_decode_packed, (rows, cols), stored)
        yield Weight(name=weight, shape=(rows, cols), stored=stored, decode=decode)
    block = _block(config)
    for base, end in named(source, ".weight_scale"):
        weight = f"{base}.weight"
        if f"{base}.weight_packed" in names or weight not in names:
            continue
        plain = (weight, base + end, *(name for name in (f"{weight}_zero_point",) if name in names))
        shown = source.info(weight).shape
        yield Weight(name=weight, shape=shown, stored=plain, decode=partial(_decode_plain, plain, block))


def _block(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Rows and columns of a block, which is the same in all groups of layers that have blocks; () without any."""
    groups = (config.get("config_groups") or {}).values()
    return next(
        (tuple(found) for group in groups if (found := (group.get("weights") or {}).get("block_structure"))), ()
    )


def decode_fp4(stored: tuple[str, ...], divides: bool, read: Read) -> HostTensor:
    """uint8 [rows, cols / 2] of float4_e2m1fn, the first of two in the low bits, with scales [rows, groups] in
    float8 or, as uint8, powers of two, and one scale for all, which multiplies or `divides`."""
    codes, scale = unpack(read(stored[0]).data, 4), read(stored[1])
    if scale.dtype == "uint8":
        scales = np.ldexp(np.float32(1), scale.data.astype(np.int32) - 127)
    else:
        scales = to_float32(scale)
    if len(stored) > 2:
        whole = to_float32(read(stored[2])).reshape(())
        scales = scales / whole if divides else scales * whole
    return from_values(scale_blocks(FP4[codes], scales))


def _decode_packed(shape: tuple[int, ...], stored: tuple[str, ...], read: Read) -> HostTensor:
    """Words hold codes along the input, zero points along the output; each row is filled up to whole words."""
    words, parts = read(stored[0]).data, {name.rpartition("_")[2]: name for name in stored[3:]}
    bits = next((bits for bits in (2, 4, 8) if words.shape[1] == -(-shape[1] * bits // 32)), 0)
    if not bits:
        raise ValueError(f"{words.shape[1]} words for {shape[1]} codes")
    codes, scales, zeros = unpack(words, bits)[:, : shape[1]], to_float32(read(stored[1])), None
    scales = np.ascontiguousarray(scales.reshape(-1, scales.shape[-1] if scales.ndim > 1 else 1))
    if "point" in parts:
        zeros = unpack(read(parts["point"]).data.T, bits).T[: shape[0]]
    if "idx" in parts:
        groups = read(parts["idx"]).data.astype(np.int64)
        if (groups >= 0).all() and not np.array_equal(groups, np.sort(groups)):
            centre = np.float32(1 << (bits - 1)) if zeros is None else zeros[:, groups].astype(np.float32)
            return from_values((codes - centre) * scales[:, groups])
    return from_codes(np.ascontiguousarray(codes), scales, zeros, bits)


def _decode_plain(stored: tuple[str, ...], block: tuple[int, ...], read: Read) -> HostTensor:
    """int8 or float8 [rows, cols] with a scale for all, for each row, group or block, and perhaps zero points."""
    weight, scales = read(stored[0]), to_float32(read(stored[1]))
    zeros = read(stored[2]).data.astype(np.float32) if len(stored) > 2 else np.zeros(1, np.float32)
    by_row = scales.ndim == 2 and scales.shape == (len(weight.data), 1)
    if weight.dtype == "int8" and by_row and not zeros.any():
        codes = weight.data.view(np.uint8) ^ np.uint8(0x80)
        return from_codes(codes, np.ascontiguousarray(scales), None, 8)
    if not zeros.any():
        return from_float8(weight, scales, block)
    values = to_float32(weight)
    values = values - scale_blocks(np.ones_like(values), zeros, block)
    return from_values(scale_blocks(values, scales, block))
