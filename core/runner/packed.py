"""A step's inputs in one buffer, so that they reach the device in one copy; its outputs come back the same way."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..stages import (
    Array,
    EncoderBatch,
    ForwardBatch,
    IntArray,
    PoolingBatch,
    PromptLogprobsBatch,
    SamplingBatch,
    StepInput,
)

ALIGN_WORDS = 16
"""Each array begins at a multiple of 64 bytes: kernels are compiled for the alignment of their pointers."""

Part = TypeVar("Part", ForwardBatch, SamplingBatch, PromptLogprobsBatch, PoolingBatch, EncoderBatch)
_FIELDS = {
    kind: tuple(field.name for field in dataclasses.fields(kind))
    for kind in (ForwardBatch, SamplingBatch, PromptLogprobsBatch, PoolingBatch, EncoderBatch)
}
_LISTS = ("block_tables", "slot_mappings", "windows", "corner_ids", "corner_weights", "mixed_rows", "mix_weights")
"""Fields that hold several arrays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Where one array lies in the buffer."""

    start: int
    shape: tuple[int, ...]
    is_float: bool

    def view(self, buffer: Array) -> Array:
        """The array as a view of the buffer, a torch tensor of int32 words."""
        import torch

        flat = buffer[self.start : self.start + math.prod(self.shape)]
        return (flat.view(torch.float32) if self.is_float else flat).view(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStep:
    """One step in one buffer. The forward batch comes first: where it lies depends on its shapes alone.

    words: int32 [size], on the host; the forward batch takes the first forward_words of it. layout: the step with a
    Piece for each array.
    """

    words: IntArray
    forward_words: int
    layout: StepInput

    def unpack(self, buffer: Array) -> StepInput:
        """The step whose arrays are views of `buffer`, which holds `words`."""
        layout, look = self.layout, lambda piece: piece.view(buffer)
        return StepInput(
            forward=_map_arrays(layout.forward, look),
            sampling=None if layout.sampling is None else _map_arrays(layout.sampling, look),
            prompt_logprobs=None if layout.prompt_logprobs is None else _map_arrays(layout.prompt_logprobs, look),
            pooling=None if layout.pooling is None else _map_arrays(layout.pooling, look),
            encoder=None if layout.encoder is None else _map_arrays(layout.encoder, look),
        )


def pack(batch: StepInput) -> PackedStep:
    """Lay out and copy all arrays (int32 or float32) of a step."""
    arrays: list[tuple[int, npt.NDArray[Any]]] = []
    size = 0

    def place(array: npt.NDArray[Any]) -> Piece:
        nonlocal size
        assert array.dtype in (np.int32, np.float32), array.dtype
        piece = Piece(start=size, shape=array.shape, is_float=array.dtype == np.float32)
        arrays.append((size, array))
        size += -(-array.size // ALIGN_WORDS) * ALIGN_WORDS
        return piece

    forward = _map_arrays(batch.forward, place)
    forward_words = size
    layout = StepInput(
        forward=forward,
        sampling=None if batch.sampling is None else _map_arrays(batch.sampling, place),
        prompt_logprobs=None if batch.prompt_logprobs is None else _map_arrays(batch.prompt_logprobs, place),
        pooling=None if batch.pooling is None else _map_arrays(batch.pooling, place),
        encoder=None if batch.encoder is None else _map_arrays(batch.encoder, place),
    )
    words = np.empty(size, np.int32)
    for start, array in arrays:
        words[start : start + array.size].view(array.dtype).reshape(array.shape)[...] = array
    return PackedStep(words=words, forward_words=forward_words, layout=layout)


def join(arrays: Sequence[Array]) -> Array:
    """Device arrays of int32 or float32 end to end, as int32 [sum of sizes]."""
    import torch

    return torch.cat([array.reshape(-1).view(torch.int32) for array in arrays])


def cut(words: IntArray, arrays: Sequence[Array]) -> list[npt.NDArray[Any]]:
    """What `join` made of `arrays`, on the host again, as numpy arrays of their shapes and dtypes."""
    pieces: list[npt.NDArray[Any]] = []
    start = 0
    for array in arrays:
        flat = words[start : start + array.numel()]
        pieces.append((flat.view(np.float32) if array.is_floating_point() else flat).reshape(tuple(array.shape)))
        start += array.numel()
    return pieces


def _map_arrays(part: Part, change: Callable[[Any], Any]) -> Part:
    """`part` with each array, or Piece, changed."""
    changed: dict[str, Any] = {}
    for name in _FIELDS[type(part)]:
        value = getattr(part, name)
        if isinstance(value, np.ndarray | Piece):
            changed[name] = change(value)
        elif name in _LISTS:
            changed[name] = [change(array) for array in value]
    return dataclasses.replace(part, **changed)
