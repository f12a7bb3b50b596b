"""AWQ (Lin et al. 2023) as AutoAWQ stores it: 4-bit codes packed along the output in its kernel's order."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from ..decoded import Read, Weight, from_codes, group_shapes, named, scheme_of_codes, unpack
from ..dequantize import to_float32
from ..quantize import Scheme
from ..source import HostTensor, WeightSource

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight columns each four bits of a word hold."""


def check(config: Mapping[str, Any]) -> str:
    """Four bits for the GEMM kernel."""
    bits, version = config.get("bits", config.get("w_bit", 4)), str(config.get("version", "gemm")).lower()
    if bits != 4:
        return f"bits must be 4, got {bits!r}"
    return "" if version == "gemm" else f"version must be gemm, got {version!r}"


def scheme(config: Mapping[str, Any]) -> Scheme | None:
    """Groups with zero points, as a rule."""
    group = config.get("group_size", config.get("q_group_size", -1))
    return scheme_of_codes(4, group, is_symmetric=not config.get("zero_point", True))


def find(source: WeightSource, config: Mapping[str, Any]) -> Iterator[Weight]:
    """qweight int32 [in, out / 8], qzeros int32 [groups, out / 8], scales float16 [groups, out]."""
    for base, end in named(source, ".qweight"):
        num_in, words = source.info(base + end).shape
        stored = tuple(base + part for part in (".qweight", ".qzeros", ".scales"))
        shapes = group_shapes(source, base, config, num_in, words * 8, 4)
        decode = partial(_decode, stored)
        yield Weight(name=f"{base}.weight", shape=(words * 8, num_in), stored=stored, shapes=shapes, decode=decode)


def _decode(stored: tuple[str, ...], read: Read) -> HostTensor:
    codes, zeros = (np.ascontiguousarray(unpack(read(name).data, 4, _ORDER).T) for name in stored[:2])
    return from_codes(codes, np.ascontiguousarray(to_float32(read(stored[2])).T), zeros, 4)
