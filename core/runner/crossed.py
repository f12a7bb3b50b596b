"""Images that cross attention reads (Llama 3.2): which of their keys stand where, which tokens see which, and the
batch of tiles that the encoder reads.

A token sees the image before it, or those before it in a row. A token before all images sees every tile, those that
are padding too, as transformers has it. So the keys of a request begin with those that the first images in a row
have, then come all others if such tokens are there; further images in a row have keys of their own, from the
beginning of a block on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..models.vision_spec import VisionSpec
from ..stages import CrossSpan, EncoderBatch, EncoderInput, ImageInput, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossKeys:
    """tiles: (image, tile) by place of its keys. first_keys: of each. num_keys: places, holes between blocks too.
    spans: by position."""

    tiles: Sequence[tuple[int, int]]
    first_keys: Sequence[int]
    num_keys: int
    spans: Sequence[CrossSpan]


def cross_keys(vision: VisionSpec, images: Sequence[ImageInput], block_size: int) -> CrossKeys:
    """Of the images of one request, at least one."""
    size, places = vision.encoder.num_learned_positions, [int(image.places[0]) for image in images]
    rows: list[list[int]] = []
    for n, place in enumerate(places):
        if n and place == places[n - 1] + 1:
            rows[-1].append(n)
        else:
            rows.append([n])
    tiles: list[tuple[int, int]] = []
    first_keys: list[int] = []
    spans: list[CrossSpan] = []
    end = 0

    def add(image: int, those: range) -> None:
        nonlocal end
        for tile in those:
            tiles.append((image, tile))
            first_keys.append(end)
            end += size

    for row in rows:
        start = end = -(-end // block_size) * block_size
        for n in row:
            add(n, range(images[n].num_tiles))
            spans.append(CrossSpan(start=places[n], first_key=start, num_keys=end - start))
        if row is rows[0] and places[0]:
            for n, image in enumerate(images):
                add(n, range(image.num_tiles if n in row else 0, vision.max_tiles))
            spans.insert(0, CrossSpan(start=0, first_key=0, num_keys=end, is_before=True))
    return CrossKeys(tiles=tiles, first_keys=first_keys, num_keys=end, spans=spans)


class CrossPlaces:
    """Per slot, what its tokens see by cross attention."""

    def __init__(self, max_num_seqs: int) -> None:
        self._spans: list[Sequence[CrossSpan]] = [()] * max_num_seqs

    def admit(self, slot: int, spans: Sequence[CrossSpan]) -> None:
        """Take what is known of a request that got a slot."""
        self._spans[slot] = spans

    def split(
        self, slots: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
    ) -> "CrossRows | None":
        """Rows of a step, cut where tokens begin to see something else; None if none sees any."""
        if not any(self._spans[slot] for slot in slots.tolist()):
            return None
        found: list[tuple[int, int, int, int, int, int]] = []
        for row, (slot, start, end) in enumerate(zip(slots.tolist(), starts.tolist(), ends.tolist(), strict=True)):
            spans = self._spans[slot] or (CrossSpan(start=0, first_key=0, num_keys=0),)
            borders = [*(span.start for span in spans[1:]), end]
            for span, border in zip(spans, borders, strict=True):
                last = min(border, end)
                if start < last:
                    kind = 0 if not span.num_keys else 1 if span.is_before else 2
                    found.append((row, start, last, span.first_key, span.num_keys, kind))
                    start = last
        return CrossRows(np.asarray(found, np.int64).T)


class CrossRows:
    """The rows of a step, cut. row: of the step; first_keys, num_keys: what its tokens see, kinds: 0 nothing, 1 what
    stands behind them, 2 an image."""

    def __init__(self, columns: npt.NDArray[np.int64]) -> None:
        self.row, self.starts, self.ends, self.first_keys, self.num_keys, self.kinds = columns

    def lens(self) -> IntArray:
        """Keys of each, at least one: a device reads it where there is none."""
        lens: IntArray = np.maximum(self.num_keys, 1).astype(np.int32)
        return lens

    def table(self, table: IntArray, block_size: int) -> IntArray:
        """The blocks of each, [num_rows, n]. table: of each row's request."""
        width = -(-int(self.num_keys.max()) // block_size)
        first = self.first_keys // block_size
        index = np.minimum(first[:, None] + np.arange(width), table.shape[1] - 1)
        blocks = np.take_along_axis(table, index, axis=1)
        shown: IntArray = np.where((self.num_keys > 0)[:, None], blocks, np.int32(0))
        return shown

    def token_kinds(self) -> IntArray:
        """[num_tokens]."""
        return np.repeat(self.kinds, self.ends - self.starts).astype(np.int32)


def crossed_batch(
    vision: VisionSpec, inputs: Sequence[EncoderInput], block_table: IntArray, *, block_size: int, dtype: str
) -> EncoderBatch:
    """The batch of all tiles of all images, whose keys are stored in the blocks of the Cross group.

    block_table: [num_inputs, max_num_blocks].
    """
    num_patches, num_tiles = vision.encoder.num_learned_positions, vision.max_tiles
    size = -(-num_patches // 8) * 8  # with rows of zeros, which patches see
    images = [image for entry in inputs for image in entry.images]
    features = np.zeros((len(images), num_tiles, size, vision.encoder.num_features), np.float32)
    for n, image in enumerate(images):
        features[n, : image.num_tiles, 1:num_patches] = np.stack(np.split(image.patches, image.num_tiles))
    shape = features.shape[:3]
    patch = np.broadcast_to(np.arange(size), shape)
    is_there = np.arange(num_tiles) < np.array([image.num_tiles for image in images])[:, None]
    is_patch = patch < num_patches
    tile = np.array([image.shape for image in images])[:, None, None] * num_tiles + np.arange(num_tiles)[:, None]
    tile = np.broadcast_to(tile, shape)
    num_places = (len(vision.tile_shapes) + 1) * num_tiles
    squares, slots, first = [], [], 0
    for entry, table in zip(inputs, block_table, strict=True):
        keys = cross_keys(vision, entry.images, block_size)
        for (image_index, tile_index), key in zip(keys.tiles, keys.first_keys, strict=True):
            squares.append(((first + image_index) * num_tiles + tile_index) * size + np.arange(num_patches))
            block, offset = np.divmod(key + np.arange(num_patches), block_size)
            slots.append(table[block] * block_size + offset)
        first += len(entry.images)

    def flat(array: npt.NDArray[np.generic]) -> IntArray:
        return array.reshape(-1).astype(np.int32)

    def weights(array: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32]:
        return array.reshape(-1, 1).astype(np.float32)

    return EncoderBatch(
        features=features.reshape(-1, features.shape[-1]),
        positions=flat(np.where(is_patch, patch, 0)),
        query_start_loc=np.arange(len(images) + 1, dtype=np.int32) * num_tiles * size,
        class_rows=flat(np.where(patch == 0, 0, -1)),
        corner_ids=[flat(tile), flat(num_places + np.where(is_patch, tile * num_patches + patch, 0))],
        corner_weights=[weights(is_patch & (patch > 0)), weights(is_patch)],
        is_patch=weights(is_patch),
        padding=flat(~(is_patch & is_there[:, :, None])),
        squares=np.concatenate(squares).astype(np.int32)[:, None],
        slot_mapping=np.concatenate(slots).astype(np.int32),
        max_query_len=num_tiles * size,
        dtype=dtype,
    )
