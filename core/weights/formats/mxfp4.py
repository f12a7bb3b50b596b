"""Experts in MXFP4 (Open Compute Project 2023) as gpt-oss stores them: blocks of 32 floats of 4 bits."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from ..decoded import FP4, Read, Weight, named, unpack
from ..source import HostTensor, WeightSource


def check(config: Mapping[str, Any]) -> str:
    """There is one kind."""
    return ""


def find(source: WeightSource, config: Mapping[str, Any]) -> Iterator[Weight]:
    """NAME_blocks uint8 [experts, out, in / 32, 16], NAME_scales uint8 [experts, out, in / 32]; the unquantized
    weight is [experts, in, out]."""
    for base, end in named(source, "_blocks"):
        num_experts, num_out, num_blocks, num_bytes = source.info(base + end).shape
        stored = (base + end, f"{base}_scales")
        shape = (num_experts, num_blocks * num_bytes * 2, num_out)
        shapes = {stored[1]: (num_experts, num_out, num_blocks)}
        yield Weight(name=base, shape=shape, stored=stored, shapes=shapes, decode=partial(_decode, stored))


def _decode(stored: tuple[str, ...], read: Read) -> HostTensor:
    """In bfloat16, which holds every value: four bits and a power of two."""
    blocks, scales = read(stored[0]).data, read(stored[1]).data
    out = np.empty((*blocks.shape[:3], 2 * blocks.shape[3]), np.uint16)
    for expert in range(len(blocks)):
        values = FP4[unpack(blocks[expert], 4)]
        scaled = np.ldexp(values, scales[expert].astype(np.int32)[..., None] - 127)
        out[expert] = scaled.view(np.uint32) >> 16
    data = out.reshape(*blocks.shape[:2], -1).swapaxes(1, 2)
    return HostTensor(name="", dtype="bfloat16", shape=data.shape, data=data)
