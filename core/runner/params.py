"""Parameters on a device through its op table: packed, stacked or uploaded by kind."""

from typing import Any

import numpy as np

from ..ops import OpTable
from ..stages import Array
from ..weights.dequantize import to_float32
from ..weights.source import HostTensor, LoadedParam


def put_param(ops: OpTable, loaded: LoadedParam, *, dtype: str, device: Any) -> Array:
    """What forward functions take for a parameter. device: as the ops take it."""
    if loaded.param.kind in ("linear", "embedding"):
        return ops.pack_linear(loaded.tensors, dtype=dtype, device=device)
    if loaded.param.kind == "stacked":
        return ops.pack_stacked(loaded.tensors, num_stacked=loaded.param.num_stacked, dtype=dtype, device=device)
    values = np.concatenate([to_float32(tensor) for tensor in loaded.tensors])
    tensor = HostTensor(name=loaded.param.name, dtype="float32", shape=values.shape, data=values)
    return ops.upload(tensor, dtype="float32", device=device)
