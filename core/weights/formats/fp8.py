"""float8 with a scale for each block of 128 x 128 (DeepSeek-V3), for each output, or for the whole weight."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ..decoded import Read, Weight, from_float8, named
from ..dequantize import to_float32
from ..quantize import FP8, Scheme
from ..source import HostTensor, WeightSource


def check(config: Mapping[str, Any]) -> str:
    """Anything: shapes say what scales are for."""
    return ""


def scheme(config: Mapping[str, Any]) -> Scheme | None:
    """A scale for each run of columns, or for each output."""
    block: Sequence[int] = config.get("weight_block_size") or ()
    return Scheme(name="fp8", group=block[1]) if len(block) == 2 else FP8


def find(source: WeightSource, config: Mapping[str, Any]) -> Iterator[Weight]:
    """NAME float8 [..., out, in] beside NAME_scale_inv or NAME_scale, which multiplies it whatever it is called."""
    names, block = set(source.names()), tuple(config.get("weight_block_size") or ())
    for base, end in named(source, "_scale_inv", "_scale"):
        if base in names and source.info(base).dtype.startswith("float8"):
            stored = (base, base + end)
            yield Weight(
                name=base, shape=source.info(base).shape, stored=stored, decode=partial(_decode, stored, block)
            )


def _decode(stored: tuple[str, ...], block: tuple[int, ...], read: Read) -> HostTensor:
    return from_float8(read(stored[0]), to_float32(read(stored[1])), block)
