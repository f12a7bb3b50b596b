"""GPTQ (Frantar et al. 2022) as AutoGPTQ and GPTQModel store it: codes packed along the input, zeros less one."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from ..decoded import Read, Weight, from_codes, from_values, group_shapes, named, scheme_of_codes, unpack
from ..dequantize import to_float32
from ..quantize import Scheme
from ..source import HostTensor, WeightSource


def check(config: Mapping[str, Any]) -> str:
    """Bits that divide a word."""
    if config.get("bits") not in (2, 4, 8):
        return f"bits must be 2, 4 or 8, got {config.get('bits')!r}"
    kind = config.get("checkpoint_format", "gptq")
    return "" if kind in ("gptq", "gptq_v2") else f"checkpoint_format must be gptq or gptq_v2, got {kind!r}"


def scheme(config: Mapping[str, Any]) -> Scheme | None:
    """Act-order scatters groups over the columns."""
    if config.get("desc_act"):
        return None
    return scheme_of_codes(config["bits"], config.get("group_size", -1), is_symmetric=bool(config.get("sym", True)))


def find(source: WeightSource, config: Mapping[str, Any]) -> Iterator[Weight]:
    """qweight int32 [in / codes of a word, out], qzeros int32 [groups, out / codes], scales [groups, out], and g_idx
    int32 [in], the group of each input."""
    bits: int = config["bits"]
    minus_one = config.get("checkpoint_format", "gptq") == "gptq"
    names = set(source.names())
    for base, end in named(source, ".qweight"):
        num_words, num_out = source.info(base + end).shape
        num_in = num_words * 32 // bits
        stored = tuple(base + part for part in (".qweight", ".qzeros", ".scales"))
        shapes = group_shapes(source, base, config, num_in, num_out, bits)
        if f"{base}.g_idx" in names:
            stored += (f"{base}.g_idx",)
            shapes[stored[-1]] = (num_in,)
        decode = partial(_decode, stored, bits, minus_one)
        yield Weight(name=f"{base}.weight", shape=(num_out, num_in), stored=stored, shapes=shapes, decode=decode)


def _decode(stored: tuple[str, ...], bits: int, minus_one: bool, read: Read) -> HostTensor:
    codes = unpack(read(stored[0]).data.T, bits)
    zeros = unpack(read(stored[1]).data, bits).T
    scales = np.ascontiguousarray(to_float32(read(stored[2])).T)
    if minus_one:
        zeros = (zeros + np.uint8(1)) & np.uint8((1 << bits) - 1)
    if len(stored) > 3:
        groups = read(stored[3]).data.astype(np.int64)
        if not np.array_equal(groups, np.arange(len(groups)) * scales.shape[1] // len(groups)):  # act-order
            return from_values((codes - zeros[:, groups].astype(np.float32)) * scales[:, groups])
    return from_codes(codes, scales, zeros, bits)
