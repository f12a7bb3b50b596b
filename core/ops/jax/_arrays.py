"""What the JAX bodies of the ops share: dtypes, widening, and compilation of an op that is called on its own."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt

from ...weights.dequantize import to_float32
from ...weights.source import HostTensor

DTYPES: dict[str, Any] = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
"""The JAX dtype of a headrace dtype name."""


def compiled(*static: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile an op as one program where it is called eagerly; inside a trace it becomes part of that.

    static: arguments that are Python values, not arrays.
    """

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        wrapped: Callable[..., Any] = jax.jit(function, static_argnames=static)
        return wrapped

    return wrap


def widen(x: Any) -> Any:
    """x in float32."""
    return x.astype(jnp.float32)


def precision(*arrays: Any) -> Any:
    """How products of these arrays are computed: float32 exactly, where a matrix unit would cut it to bfloat16."""
    return jax.lax.Precision.HIGHEST if any(a.dtype == jnp.float32 for a in arrays) else None


def drop_negative(indices: Any, size: int) -> Any:
    """Indices for a scatter with mode="drop": a negative one would count from the end, and is put past it."""
    return jnp.where(indices < 0, size, indices)


def to_numpy(tensor: HostTensor, dtype: str) -> npt.NDArray[Any]:
    """A tensor's values [*shape] in the numpy dtype that JAX knows `dtype` by; it may be the tensor's own memory."""
    wanted = np.dtype(DTYPES[dtype])
    if tensor.dtype == dtype:
        data = tensor.data.reshape(tensor.shape)
        return data.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else data
    return to_float32(tensor).astype(wanted, copy=False)


def place(array: npt.NDArray[Any], device: Any) -> Any:
    """An array on a device: a JAX device or sharding, None is JAX's default.

    The caller must not write to `array` again: on a host device JAX may keep its memory.
    """
    return jax.device_put(array, device)
