"""Ops that hold weights: packing, linear products, embedding rows. One family: they share the packed layout."""

from collections.abc import Sequence

from ..stages import Array
from ..weights.source import HostTensor


def pack_linear(tensors: Sequence[HostTensor], *, dtype: str, device: str) -> Array:
    """Put a weight on the device in the provider's own layout; runs once, at load.

    tensors: stacked along the output rows, each [rows, in_features], any dtype or block type.
    Returns an opaque weight for `linear` and `embedding`. The definition dequantizes to `dtype`.
    """
    import torch

    from ._torch import to_torch, torch_dtype

    rows = sum(tensor.shape[0] for tensor in tensors)
    weight = torch.empty((rows, *tensors[0].shape[1:]), dtype=torch_dtype(dtype), device=device)
    start = 0
    for tensor in tensors:
        weight[start : start + tensor.shape[0]].copy_(to_torch(tensor))
        start += tensor.shape[0]
    return weight


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x @ weight.T + bias.

    x: [num_tokens, in_features], weight: packed [out_features, in_features], bias: float32 [out_features].
    Returns [num_tokens, out_features] in x's dtype. Products accumulate in float32 at least.
    """
    import torch

    y = torch.nn.functional.linear(x, weight.to(x.dtype))
    return y if bias is None else y + bias.to(x.dtype)


def embedding(token_ids: Array, weight: Array) -> Array:
    """Rows of a packed weight.

    token_ids: int32 [num_tokens], each in [0, vocab_size). Returns [num_tokens, hidden_size] in the packed
    weight's compute dtype.
    """
    return weight[token_ids.long()]
