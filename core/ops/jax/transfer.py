"""Between host and device, in JAX."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ...stages import Array
from ...weights.source import HostTensor
from ._arrays import compiled, drop_negative, place, to_numpy


def upload(tensor: HostTensor, *, dtype: str, device: Any) -> Array:
    """A parameter that is not packed. device: a JAX device or sharding."""
    return place(to_numpy(tensor, dtype).copy(), device)


def to_device(array: npt.NDArray[Any], *, device: Any = None) -> Array:
    """A step's input on the device. JAX may keep the memory that it is given, so it gets a copy."""
    return place(np.array(array), device)


def to_host(array: Array) -> npt.NDArray[Any]:
    """A result on the host; waits for the device."""
    return np.asarray(array)


@compiled()
def remember_tokens(last_tokens: Array, slots: Array, token_ids: Array) -> Array:
    """last_tokens with last_tokens[slots] = token_ids; a negative slot is padding."""
    return last_tokens.at[drop_negative(slots, last_tokens.shape[0])].set(token_ids, mode="drop")


@compiled()
def recall_tokens(input_ids: Array, last_tokens: Array, slots: Array) -> Array:
    """input_ids with each -1 replaced by last_tokens[slots[i]]."""
    return jnp.where(input_ids < 0, jnp.take(last_tokens, slots, mode="clip"), input_ids)


FUNCTIONS = (upload, to_device, to_host, remember_tokens, recall_tokens)
