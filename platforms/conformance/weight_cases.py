"""Weights as checkpoints and `--quantize` store them, and what products with them may be off by."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from headrace.core.weights.block_types import BLOCK_TYPES
from headrace.core.weights.dequantize import to_float32
from headrace.core.weights.quantize import CODES, FP8, INT4, INT5, INT5_OFFSETS, INT8, INT8_GROUPS, quantize_rows
from headrace.core.weights.source import HostTensor

from .values import HostArray, Rng

if TYPE_CHECKING:
    import torch

QUANTIZED = {
    "int8": INT8_GROUPS,
    "int8-channel": INT8,
    "fp8": FP8,
    **{name: INT4[name] for name in ("int4", "int4-sym")},
}
"""Weights as `--quantize` leaves them."""
FURTHER = {"int5": INT5, "int5-offsets": INT5_OFFSETS, "int4-g64": INT4["int4-g64"], "int4-g128": INT4["int4-g128"]}
"""Others, which are in files or mixed by `--quantize`."""


def host_tensor(rng: Rng, rows: int, columns: int, dtype: str) -> HostTensor:
    """A weight of a checkpoint: in a dtype, a scheme of `QUANTIZED` or `FURTHER`, or a GGUF block type."""
    values = (rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)
    if dtype in QUANTIZED or dtype in FURTHER:
        scheme = {**QUANTIZED, **FURTHER}[dtype]
        codes, code_scales, offsets = quantize_rows(values, scheme)
        return HostTensor(
            name="weight",
            dtype=CODES[scheme.name],
            shape=values.shape,
            data=codes,
            scales=code_scales,
            offsets=offsets,
        )
    if (block := BLOCK_TYPES.get(dtype)) is not None:
        blocks = rng.integers(0, 256, (rows, columns // block.num_values, block.num_bytes)).astype(np.uint8)
        scales = rng.uniform(0.001, 0.01, (*blocks.shape[:2], 2)) * (32 / block.num_values)
        bits = scales.astype(np.float16).view(np.uint8)
        place = -2 if dtype == "q6_k" else 0  # where the block's own scale stands; a minimum stands behind it
        has_minimum = dtype in ("q4_1", "q5_1", "q4_k", "q5_k")
        blocks[..., place : place + 2 + 2 * has_minimum or None] = bits[..., : 2 + 2 * has_minimum]
        data: HostArray = blocks.reshape(rows, -1)
    elif dtype == "bfloat16":
        data = (values.view(np.uint32) >> 16).astype(np.uint16)
    else:
        data = values.astype(dtype)
    return HostTensor(name="weight", dtype=dtype, shape=(rows, columns), data=data)


def eased(stored: str) -> float:
    """The error of products with weights that stay as they are stored: activations may be rounded, too."""
    return 4e-3 if stored == "fp8" else 5e-4  # 4 bits, or 8; of few sums


def rounded(tensors: Sequence[HostTensor], dtype: str) -> "torch.Tensor":
    """The stacked weight in float64, rounded to `dtype` first as the definition does."""
    import torch

    whole = torch.from_numpy(np.concatenate([to_float32(tensor) for tensor in tensors]))
    return whole.to(getattr(torch, dtype)).to(torch.float64)
