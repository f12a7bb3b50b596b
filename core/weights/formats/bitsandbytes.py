"""LLM.int8 (Dettmers et al. 2022) and NF4 or FP4 (Dettmers et al. 2023) as bitsandbytes stores them."""

import json
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from ..decoded import Read, Weight, from_codes, from_values, named
from ..dequantize import to_float32
from ..quantize import INT8, Scheme
from ..source import HostTensor, WeightSource


def check(config: Mapping[str, Any]) -> str:
    """Anything: what lies beside a weight says how it is stored."""
    return ""


def scheme(config: Mapping[str, Any]) -> Scheme | None:
    """LLM.int8 has a scale for each output."""
    return INT8 if config.get("load_in_8bit") else None


def find(source: WeightSource, config: Mapping[str, Any]) -> Iterator[Weight]:
    """weight int8 [out, in] beside SCB float32 [out]; or weight uint8 [n / 2, 1] beside its state, JSON."""
    names = set(source.names())
    for base, end in named(source, ".SCB"):
        stored = tuple(name for name in (f"{base}.weight", base + end, f"{base}.weight_format") if name in names)
        shape = source.info(stored[0]).shape
        yield Weight(name=stored[0], shape=shape, stored=stored, decode=partial(_decode_int8, stored))
    kinds = tuple(f".weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
    for base, end in named(source, *kinds):
        state = json.loads(source.read(base + end).data.tobytes())
        parts = ("", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
        stored = tuple(name for part in parts if (name := f"{base}.weight{part}") in names)
        decode = partial(_decode_nibbles, state, stored)
        yield Weight(name=stored[0], shape=tuple(state["shape"]), stored=(*stored, base + end), decode=decode)


def _decode_int8(stored: tuple[str, ...], read: Read) -> HostTensor:
    codes = read(stored[0]).data.view(np.uint8) ^ np.uint8(0x80)
    return from_codes(codes, to_float32(read(stored[1])).reshape(-1, 1) / np.float32(127), None, 8)


def _decode_nibbles(state: Mapping[str, Any], stored: tuple[str, ...], read: Read) -> HostTensor:
    """Values of a table times the largest value of their block, which may come out of a table itself."""
    packed, largest = read(stored[0]).data.reshape(-1), read(stored[1])
    table = to_float32(read(stored[2])).reshape(-1)
    absmax = largest.data.reshape(-1)
    if len(stored) > 3:
        outer, levels = (to_float32(read(name)).reshape(-1) for name in stored[3:])
        absmax = levels[absmax] * np.repeat(outer, state["nested_blocksize"])[: len(absmax)]
        absmax = absmax + np.float32(state["nested_offset"])
    else:
        absmax = to_float32(largest).reshape(-1)
    values = table[np.stack([packed >> 4, packed & 15], axis=-1).reshape(-1)]  # the high bits come first
    size = state["blocksize"]
    values = values[: math.prod(state["shape"])]
    values *= np.repeat(absmax, size)[: len(values)]
    return from_values(values.reshape(state["shape"]))
