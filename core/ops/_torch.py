"""Between HostTensor and torch. Imported only where torch is used."""

import math
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..weights.dequantize import to_float32
from ..weights.source import HostTensor

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a headrace dtype name."""
    return _DTYPES[name]


def zeros(shape: tuple[int, ...], dtype: str, device: str) -> torch.Tensor:
    """A tensor of zeros. In host memory its pages are taken from the system only as they are written."""
    wanted = torch_dtype(dtype)
    if device != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=wanted, device=device)
    pages = np.zeros(math.prod(shape) * wanted.itemsize, np.uint8)
    return torch.from_numpy(pages).view(wanted).view(shape)


def to_torch(tensor: HostTensor) -> torch.Tensor:
    """A tensor in host memory, [*shape]. Block types and dtypes that torch lacks come out as float32.

    The result may share memory with `tensor`: copy, never write.
    """
    if tensor.dtype == "bfloat16":
        return _from_numpy(tensor.data.view(np.int16)).view(torch.bfloat16).reshape(tensor.shape)
    if tensor.dtype in ("float64", "float32", "float16"):
        return _from_numpy(tensor.data).reshape(tensor.shape)
    return torch.from_numpy(to_float32(tensor))


def _from_numpy(data: npt.NDArray[Any]) -> torch.Tensor:
    with warnings.catch_warnings():
        # torch warns that the memory is read-only; the caller only reads.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(data)
