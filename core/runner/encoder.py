"""The encoder's share of a step: from the inputs of requests to one ragged batch. numpy only."""

from collections.abc import Sequence

import numpy as np

from ..models.spec import ModelSpec
from ..stages import EncoderBatch, EncoderInput, IntArray


def encoder_batch(
    spec: ModelSpec, inputs: Sequence[EncoderInput], block_table: IntArray, *, block_size: int, dtype: str
) -> EncoderBatch:
    """The batch of whole inputs, whose outputs are stored in the blocks of the Cross group.

    spec: of the encoder. block_table: [num_inputs, max_num_blocks]. dtype: of activations.
    """
    lens = np.array([entry.num_tokens(spec) for entry in inputs])
    starts = np.zeros(len(inputs) + 1, np.int32)
    np.cumsum(lens, out=starts[1:])
    rows = np.repeat(np.arange(len(inputs)), lens)
    positions = np.arange(starts[-1]) - starts[rows]
    slots = block_table[rows, positions // block_size] * block_size + positions % block_size
    features = input_ids = None
    windows: list[IntArray] = []
    if spec.num_features:
        features = np.concatenate([entry.features for entry in inputs if entry.features is not None])
        counts = np.array([len(entry.features) for entry in inputs if entry.features is not None])
        for convolution in spec.convolutions:
            windows.append(_windows(counts, convolution.kernel, convolution.stride))
            counts = counts // convolution.stride
    else:
        input_ids = np.concatenate([entry.token_ids for entry in inputs]).astype(np.int32)
    return EncoderBatch(
        input_ids=input_ids,
        features=features,
        windows=windows,
        positions=positions.astype(np.int32),
        query_start_loc=starts,
        slot_mapping=slots.astype(np.int32),
        dtype=dtype,
        max_query_len=int(lens.max()),
    )


def _windows(counts: IntArray, kernel: int, stride: int) -> IntArray:
    """The rows under each step of a convolution, [sum of counts / stride, kernel]; -1 beyond an input's ends."""
    parts, start = [], 0
    for count in counts.tolist():
        inside = np.arange(count // stride)[:, None] * stride + np.arange(kernel) - kernel // 2
        parts.append(np.where((inside >= 0) & (inside < count), inside + start, -1))
        start += count
    return np.concatenate(parts).astype(np.int32)
