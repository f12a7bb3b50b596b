"""Attention of whole requests: the caches that hold a step's own keys and values, and biases by distance."""

import math

import numpy as np
import numpy.typing as npt

from headrace.core.ops.attention import MAX_DISTANCE
from headrace.kernels.cpu import _ops

from .values import Trace, Value

OWN_BLOCK_SIZE = 16
"""Each request begins a block of its own, so that its bits do not depend on where it stands in a batch."""


def own_blocks(max_tokens: int, max_requests: int) -> int:
    """Blocks that the requests of a step take at most."""
    return -(-max_tokens // OWN_BLOCK_SIZE) + max_requests


def own_heads(key: Value) -> tuple[int, int]:
    """(num_kv_heads, head_dim)."""
    return key.cols // key.head_dim, key.head_dim


def own_bytes(trace: Trace, max_tokens: int, max_requests: int) -> int:
    """Bytes of the caches of a step's own keys and values."""
    keys = [i.inputs[1] for i in trace.instructions if i.op == "encoder_attention"]
    kinds = {(*own_heads(key), key.dtype) for key in keys if isinstance(key, Value)}
    blocks = own_blocks(max_tokens, max_requests)
    return sum(_ops.kv_bytes(blocks, OWN_BLOCK_SIZE, *kind) for kind in kinds)


def biases_by_distance(table: npt.NDArray[np.float32], *, both_ways: bool) -> list[float]:
    """T5's biases as the kernels take them: of each head, by key - query from -128 to 128.

    table: [num_buckets, num_heads]. both_ways: its second half is for keys after the query; else those have the bias
    of the query itself.
    """
    assert _ops.MAX_DISTANCE == MAX_DISTANCE
    distances = np.arange(-MAX_DISTANCE, MAX_DISTANCE + 1)
    if both_ways:
        half = len(table) // 2
        rows = _buckets(np.abs(distances), half) + (distances > 0) * half
    else:
        rows = _buckets(np.maximum(-distances, 0), len(table))
    biases: list[float] = table[rows].T.ravel().tolist()
    return biases


def _buckets(distances: npt.NDArray[np.int64], num_buckets: int) -> npt.NDArray[np.int64]:
    """As `core.ops.attention.distance_buckets`, in float32 as there."""
    exact = num_buckets // 2
    ratio = np.maximum(distances, 1).astype(np.float32) / np.float32(exact)
    steps = np.log(ratio) / np.float32(math.log(MAX_DISTANCE / exact)) * np.float32(num_buckets - exact)
    far = np.minimum(exact + steps.astype(np.int64), num_buckets - 1)
    return np.where(distances < exact, distances, far)
