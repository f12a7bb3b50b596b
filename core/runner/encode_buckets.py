"""The shapes that a compiled pass over an encoder's inputs may have: all arrays of it by how many tokens it reads."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..kv.groups import cross_group
from ..kv.images import MAX_PATCHES
from ..models.spec import ModelSpec
from ..models.vision_spec import VisionSpec
from ..platform import RunnerConfig
from ..stages import Array, EncoderBatch

Layout = Mapping[str, tuple[tuple[int, ...], Any, float]]
"""Array name -> (shape, numpy dtype of 4 bytes, padding value)."""

_SMALLEST_TEXT = 32
_SMALLEST_IMAGE = 64
_TILE_MULTIPLE = 8
"""Rows of a tile that cross attention reads are padded to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeBucket:
    """The shape of a pass over whole inputs. num_rows: what is kept of them. is_mixed: rows of images lie between
    others."""

    num_tokens: int
    num_rows: int
    is_mixed: bool = False


class EncodeBuckets:
    """All shapes of the encoder that a model's decoder reads; none of a model without one."""

    def __init__(self, config: RunnerConfig) -> None:
        self._encoder, self._vision = config.spec.encoder, config.spec.vision
        self.num_tokens = tuple(sorted(_sizes(config)))

    def all(self) -> list[EncodeBucket]:
        """Every pass that warmup compiles."""
        ways = (False, True) if self._vision is not None and self._vision.has_newline else (False,)
        return [
            EncodeBucket(num_tokens=n, num_rows=self._num_rows(n), is_mixed=is_mixed)
            for n in self.num_tokens
            for is_mixed in ways
        ]

    def of(self, batch: EncoderBatch) -> EncodeBucket:
        """The bucket of a pass; above all others one of a power of two."""
        tokens, rows = len(batch.positions), len(batch.slot_mapping)
        size = next((n for n in self.num_tokens if n >= tokens), 1 << (tokens - 1).bit_length())
        num_rows = self._num_rows(size)
        while num_rows < rows:
            num_rows *= 2
        return EncodeBucket(num_tokens=size, num_rows=num_rows, is_mixed=bool(len(batch.mixed_rows)))

    def layout(self, bucket: EncodeBucket) -> Layout:
        """Where the arrays of a bucket's input lie. There are no more inputs, and no more windows, than tokens."""
        tokens = bucket.num_tokens
        common: Layout = {
            "positions": ((tokens,), np.int32, 0),
            "query_start_loc": ((tokens + 1,), np.int32, 0),
            "slot_mapping": ((bucket.num_rows,), np.int32, -1),
        }
        if self._vision is not None:
            return {**common, **_image_layout(self._vision, bucket)}
        assert self._encoder is not None, "a model without an encoder has no other input"
        return {**common, **_input_layout(self._encoder, tokens)}

    def values(self, batch: EncoderBatch, bucket: EncodeBucket) -> dict[str, npt.NDArray[Any]]:
        """The arrays of a pass by the names of its layout. Padding has no inputs and windows: where they begin
        goes on with its last value."""
        values: dict[str, npt.NDArray[Any]] = {}
        for field in dataclasses.fields(batch):
            value = getattr(batch, field.name)
            for n, part in enumerate(value) if isinstance(value, tuple | list) else ():
                values[f"{field.name}.{n}"] = part
            if isinstance(value, np.ndarray):
                values[field.name] = value
        for name in ("query_start_loc", "window_start_loc"):
            if name in values:
                starts = values[name]
                ends = np.full(bucket.num_tokens + 1 - len(starts), starts[-1], np.int32)
                values[name] = np.concatenate([starts, ends])
        return values

    def _num_rows(self, num_tokens: int) -> int:
        if self._vision is None:
            return num_tokens
        # Images put together from tiles have a row more behind each line.
        return -(-num_tokens // self._vision.merge**2) * (2 if self._vision.has_newline else 1)


def encoder_batch_of(arrays: Mapping[str, Array], dtype: str) -> EncoderBatch:
    """The batch of arrays by the names of a layout. dtype: of activations."""
    fields: dict[str, Any] = {}
    for name, array in arrays.items():
        field, is_part, _ = name.partition(".")
        if is_part:
            fields.setdefault(field, []).append(array)
        else:
            fields[field] = array
    return EncoderBatch(**fields, dtype=dtype)


def _sizes(config: RunnerConfig) -> set[int]:
    """How many tokens a pass may have: each is twice the one before, those of texts four times."""
    encoder, vision = config.spec.encoder, config.spec.vision
    longest = config.groups[cross_group(config.groups)].num_tokens if config.groups else 0
    if vision is not None:
        one = _SMALLEST_IMAGE
        most = min(MAX_PATCHES, config.num_image_rows * vision.merge**2)
        if vision.is_crossed:  # all tiles of an image, padding too
            one = vision.max_tiles * (-(-vision.encoder.num_learned_positions // _TILE_MULTIPLE) * _TILE_MULTIPLE)
            most = max(one, MAX_PATCHES // one * one)
        return _steps(one, most, 2)
    if encoder is None:
        return set()
    most = max(longest, config.max_num_batched_tokens)
    if encoder.num_features:  # every input is as long as the longest
        return _steps(longest, most // longest * longest, 2)
    return _steps(min(_SMALLEST_TEXT, most), most, 4)


def _steps(smallest: int, largest: int, factor: int) -> set[int]:
    sizes = {largest}
    while smallest < largest:
        sizes.add(smallest)
        smallest *= factor
    return sizes


def _input_layout(encoder: ModelSpec, tokens: int) -> Layout:
    """Of another prompt, or of frames: those under each step of a convolution."""
    if not encoder.num_features:
        return {"input_ids": ((tokens,), np.int32, 0)}
    strides = [convolution.stride for convolution in encoder.convolutions]
    frames: tuple[tuple[int, ...], Any, float] = ((tokens * math.prod(strides), encoder.num_features), np.float32, 0)
    layout = {"features": frames}
    for n, convolution in enumerate(encoder.convolutions):
        rows = tokens * math.prod(strides[n + 1 :])
        layout[f"windows.{n}"] = ((rows, convolution.kernel), np.int32, -1)
    return layout


def _image_layout(vision: VisionSpec, bucket: EncodeBucket) -> Layout:
    """Of patches, and of the rows that they become."""
    tokens, rows, merged = bucket.num_tokens, bucket.num_rows, vision.merge**2
    is_mean = vision.projector.is_mean
    layout: dict[str, tuple[tuple[int, ...], Any, float]] = {
        "features": ((tokens, vision.encoder.num_features), np.float32, 0),
        "squares": ((rows * merged, 1) if is_mean else (rows, merged), np.int32, -1),
    }
    if is_mean:
        layout |= {"row_starts": ((rows,), np.int32, 0), "row_ends": ((rows,), np.int32, 0)}
    if vision.has_newline:
        layout["newline_rows"] = ((rows,), np.int32, -1)
    if bucket.is_mixed:
        for n in range(4):
            layout[f"mixed_rows.{n}"] = ((rows, 1), np.int32, -1)
            layout[f"mix_weights.{n}"] = ((rows, 1), np.float32, 0)
    if vision.has_class:
        layout["class_rows"] = ((tokens,), np.int32, -1)
    if any(layer.attn.in_window for layer in vision.encoder.layers):
        layout["window_start_loc"] = ((tokens + 1,), np.int32, 0)
    if vision.is_crossed:
        layout["is_patch"] = ((tokens, 1), np.float32, 0)
        layout["padding"] = ((tokens,), np.int32, 1)
    else:
        layout["rope_positions"] = ((tokens, 2), np.int32, 0)
    num_corners = 2 if vision.is_crossed else (16 if vision.is_bicubic else 4) if vision.num_corners else 0
    for n in range(num_corners):
        layout[f"corner_ids.{n}"] = ((tokens,), np.int32, 0)
        layout[f"corner_weights.{n}"] = ((tokens, 1), np.float32, 0)
    return layout
