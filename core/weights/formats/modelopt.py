"""What Model Optimizer (modelopt) writes: float8 with one scale, and NVFP4 with scales by 16 columns."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ..decoded import Weight, named
from ..source import WeightSource
from .compressed_tensors import decode_fp4
from .fp8 import find as find_float8


def check(config: Mapping[str, Any]) -> str:
    """Two kinds of many."""
    kind = config.get("quant_algo")
    return "" if kind in ("FP8", "NVFP4") else f"quant_algo must be FP8 or NVFP4, got {kind!r}"


def find(source: WeightSource, config: Mapping[str, Any]) -> Iterator[Weight]:
    """weight uint8 [out, in / 2], weight_scale float8 [out, in / 16], weight_scale_2 float32 []; or as `fp8`."""
    for base, _ in named(source, ".weight_scale_2"):
        stored = tuple(base + part for part in (".weight", ".weight_scale", ".weight_scale_2"))
        rows, num_bytes = source.info(stored[0]).shape
        decode = partial(decode_fp4, stored, False)
        yield Weight(name=stored[0], shape=(rows, num_bytes * 2), stored=stored, decode=decode)
    yield from find_float8(source, config)
