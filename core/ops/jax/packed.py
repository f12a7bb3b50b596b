"""Ops that hold weights. A packed weight is one array [out_features, in_features], or a tuple of such arrays.

A tuple holds the parts of a fused weight, each cut over the devices by itself. Its product is a tuple too, in which
every device has its share of each part; joined, the parts would have to be dealt out anew. `split` and `act_mul`, the
two ops that follow a fused product, take it.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...stages import Array
from ...weights.source import HostTensor
from ._arrays import compiled, place, precision, to_numpy


def pack_linear(tensors: Sequence[HostTensor], *, dtype: str, device: Any) -> Array:
    """One array of all tensors. device: a JAX device or sharding."""
    pieces = [to_numpy(tensor, dtype) for tensor in tensors]
    # A checkpoint's file may be unmapped while JAX still has its memory, hence a copy even of a single tensor.
    return place(np.concatenate(pieces), device)


@compiled()
def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x @ weight.T + bias. A tuple of weights has a tuple of biases or none, and gives a tuple."""
    if isinstance(weight, tuple):
        biases = [None] * len(weight) if bias is None else bias
        return tuple(_product(x, w, b) for w, b in zip(weight, biases, strict=True))
    return _product(x, weight, bias)


@compiled()
def embedding(token_ids: Array, weight: Array) -> Array:
    """Rows of a packed weight."""
    return jnp.take(weight, token_ids, axis=0, mode="clip")


def _product(x: Array, weight: Array, bias: Array | None) -> Array:
    y = jax.lax.dot_general(x, weight.astype(x.dtype), (((x.ndim - 1,), (1,)), ((), ())), precision=precision(x))
    return y if bias is None else y + bias.astype(y.dtype)


FUNCTIONS = (pack_linear, linear, embedding)
