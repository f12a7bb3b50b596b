"""Between host and device: the only ops whose arguments or results are numpy arrays."""

from typing import Any

import numpy.typing as npt

from ..stages import Array
from ..weights.source import HostTensor


def upload(tensor: HostTensor, *, dtype: str, device: str) -> Array:
    """A parameter that is not packed (norm weights, biases, constants) on the device, in `dtype`."""
    from ._torch import to_torch, torch_dtype

    return to_torch(tensor).to(device=device, dtype=torch_dtype(dtype), copy=True)


def to_device(array: npt.NDArray[Any], *, device: str = "cpu") -> Array:
    """A step's input (int32 or float32) on the device. The caller may reuse `array` at once.

    A runner binds `device` in its table, so that code above it passes the array alone.
    """
    import torch

    return torch.from_numpy(array).to(device=device, copy=True)


def to_host(array: Array) -> npt.NDArray[Any]:
    """A result on the host, same shape; waits for the device."""
    result: npt.NDArray[Any] = array.detach().cpu().numpy()
    return result


def remember_tokens(last_tokens: Array, slots: Array, token_ids: Array) -> Array:
    """last_tokens[slots] = token_ids: what each slot sampled last; mutates last_tokens and returns it.

    last_tokens: int32 [max_num_seqs]; slots, token_ids: int32 [num_samples].
    """
    last_tokens[slots.long()] = token_ids
    return last_tokens


def recall_tokens(input_ids: Array, last_tokens: Array, slots: Array) -> Array:
    """input_ids with each -1 replaced by last_tokens[slots[i]] (run-ahead). int32 [num_tokens]."""
    import torch

    return torch.where(input_ids < 0, last_tokens[slots.long()], input_ids)
