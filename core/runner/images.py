"""Images in a step: the ragged batch of patches that the encoder reads, and what the decoder finds where."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..kv.groups import cross_group
from ..kv.images import MAX_PATCHES
from ..models.rope import NUM_AXES, has_axes
from ..models.spec import ModelSpec
from ..models.vision_spec import VisionSpec
from ..platform import RunnerConfig
from ..stages import EncoderBatch, FloatArray, IntArray, KeptImage, NewRequest
from ..weights.source import DTYPE_BYTES


class ImagePlaces:
    """Per slot, what each position of a request means: which row of an image stands there, where ropes turn it to,
    and how far it sees. Arrays that the model has no use for are not there."""

    def __init__(self, spec: ModelSpec, *, max_num_seqs: int, length: int, block_size: int) -> None:
        self._spec = spec
        self._block_size = block_size
        shape = (max_num_seqs, length)
        has_rows = spec.vision is not None and not spec.vision.is_crossed
        self._rows = np.full(shape, -1, np.int32) if has_rows else None
        self._axes = np.zeros((*shape, NUM_AXES), np.int32) if has_axes(spec) else None
        sees_ahead = spec.vision is not None and spec.vision.sight != "past"
        self._reach = np.zeros(shape, np.int32) if sees_ahead else None

    def admit(self, new: NewRequest) -> None:
        """Take what is known of a request that got a slot."""
        slot = new.slot
        if self._rows is not None:
            self._rows[slot] = -1
            for kept in new.images:
                if kept.blocks:
                    self._rows[slot, kept.image.places] = _kept_slots(kept, self._block_size)
        if self._axes is not None:
            self._axes[slot] = token_positions(self._spec, new.images, len(self._axes[slot]))
        if self._reach is not None:
            assert self._spec.vision is not None
            self._reach[slot] = 0
            if self._spec.vision.sight == "prompt":
                self._reach[slot, : new.num_prompt_tokens] = new.num_prompt_tokens
            for kept in new.images if self._spec.vision.sight == "image" else ():
                start, end = int(kept.image.places[0]), int(kept.image.places[-1]) + 1
                self._reach[slot, start:end] = end

    def batch(
        self, token_slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], input_ids: IntArray
    ) -> dict[str, Any]:
        """The fields of a ForwardBatch for these tokens. Ids that an image's row takes the place of become 0, since
        the vocabulary may lack them."""
        fields: dict[str, Any] = {"input_ids": input_ids}
        if self._rows is not None:
            rows = self._rows[token_slots, positions]
            if (rows >= 0).any():
                fields |= {"image_rows": rows, "input_ids": np.where(rows >= 0, 0, input_ids).astype(np.int32)}
        if self._axes is not None:
            fields["rope_positions"] = self._axes[token_slots, positions]
        if self._reach is not None:
            reach = self._reach[token_slots, positions]
            if reach.any():
                fields["reach"] = reach
        return fields


def image_step_bytes(config: RunnerConfig) -> int:
    """Bytes of what the encoder holds at the same time, where ops widen what they compute to float32, in the largest
    step: the streams of a layer, and its feed-forward block. More images than in that are in a request of its own."""
    vision = config.spec.vision
    if vision is None:
        return 0
    encoder, size = vision.encoder, DTYPE_BYTES[config.dtype]
    mlp, num_patches = encoder.layers[0].mlp, min(MAX_PATCHES, config.num_image_rows * vision.merge**2)
    if vision.is_crossed:
        num_patches = config.groups[cross_group(config.groups)].num_tokens
    kept = 2 + len(vision.chosen) + len(vision.joined) + len(vision.taps)
    wide = mlp.intermediate_size * (1 + mlp.gated) * (size + 2 * DTYPE_BYTES["float32"])
    return num_patches * (encoder.num_features * DTYPE_BYTES["float32"] + encoder.hidden_size * kept * size + wide)


def image_batch(vision: VisionSpec, images: Sequence[KeptImage], *, block_size: int, dtype: str) -> EncoderBatch:
    """The batch of whole images, whose rows are kept in their blocks. dtype: of activations."""
    tiles = [(kept.image, n) for kept in images for n in range(kept.image.num_tiles)]
    layouts = [_layout(vision, image.grid) for image, _ in tiles]
    patches = [_with_class(vision, np.split(image.patches, image.num_tiles)[n]) for image, n in tiles]
    starts = np.cumsum([0, *(len(part) for part in patches)]).astype(np.int32)
    squares = np.concatenate(
        [layout["squares"] + start for layout, start in zip(layouts, starts.tolist(), strict=False)]
    )
    num_patches, num_corners = vision.merge**2, (16 if vision.is_bicubic else 4) if vision.num_corners else 0
    rows, weights = _rows_of_images(vision, images)
    if rows is not None and weights is None:
        squares = np.concatenate([squares, np.full_like(squares[:1], -1)])[rows[:, 0]]
    row_ends = np.arange(1, len(squares) + 1, dtype=np.int32) * num_patches
    windows = [layout["windows"] + start for layout, start in zip(layouts, starts.tolist(), strict=False)]
    has_window = any(layer.attn.in_window for layer in vision.encoder.layers)
    order = np.concatenate([layout["order"] + start for layout, start in zip(layouts, starts.tolist(), strict=False)])

    def joined(name: str) -> IntArray:
        return np.concatenate([layout[name] for layout in layouts]).astype(np.int32)

    return EncoderBatch(
        features=np.concatenate(patches)[order],
        positions=joined("positions"),
        rope_positions=joined("places"),
        query_start_loc=starts,
        window_start_loc=np.concatenate([*windows, starts[-1:]]).astype(np.int32) if has_window else None,
        max_query_len=int(np.diff(starts).max()),
        squares=(squares.reshape(-1, 1) if vision.projector.is_mean else squares).astype(np.int32),
        row_starts=row_ends - num_patches if vision.projector.is_mean else None,
        row_ends=row_ends if vision.projector.is_mean else None,
        newline_rows=None if rows is None else np.where(rows[:, 0] < 0, 0, -1).astype(np.int32),
        mixed_rows=() if weights is None or rows is None else [rows[:, n : n + 1].copy() for n in range(4)],
        mix_weights=() if weights is None else [weights[:, n : n + 1].copy() for n in range(4)],
        class_rows=joined("class_rows") if vision.has_class else None,
        corner_ids=[joined(f"corner_{n}") for n in range(num_corners)],
        corner_weights=[
            np.concatenate([layout[f"weight_{n}"] for layout in layouts]).astype(np.float32)[:, None]
            for n in range(num_corners)
        ],
        slot_mapping=np.concatenate([_kept_slots(kept, block_size) for kept in images]),
        dtype=dtype,
    )


def _rows_of_images(vision: VisionSpec, images: Sequence[KeptImage]) -> tuple[IntArray | None, FloatArray | None]:
    """Where images are put together from tiles: the rows of all tiles that each row takes, [num_rows, 1], or
    [num_rows, 4] with their weights; -1 is none."""
    if not vision.has_newline:
        return None, None
    has_weights = any(kept.image.weights is not None for kept in images)
    rows, weights, start = [], [], 0
    for kept in images:
        image = kept.image
        count = len(image.patches) // vision.merge**2
        own = np.arange(count, dtype=np.int32)[:, None] if image.rows is None else image.rows
        rows.append(np.pad(np.where(own < 0, -1, own + start), ((0, 0), (0, 4 - own.shape[1])), constant_values=-1))
        ones = np.eye(4, dtype=np.float32)[np.zeros(len(own), np.int64)]
        weights.append(ones if image.weights is None else image.weights)
        start += count
    joined = np.concatenate(rows).astype(np.int32)
    return (joined, np.concatenate(weights)) if has_weights else (joined[:, :1], None)


def token_positions(spec: ModelSpec, images: Sequence[KeptImage], length: int) -> IntArray:
    """Time, height and width of each position of a request (M-RoPE, Qwen2-VL), [length, 3].

    Text counts on in all three; an image is one moment, its rows count from there, and what follows it begins behind
    its longer side.
    """
    assert not images or spec.vision is not None
    out = np.repeat(np.arange(length, dtype=np.int32)[:, None], NUM_AXES, 1)
    for kept in images:
        assert spec.vision is not None
        height, width = (side // spec.vision.merge for side in kept.image.grid)
        places = kept.image.places
        now = int(out[places[0], 0])
        rows, columns = np.divmod(np.arange(height * width), width)
        out[places] = np.stack([np.full_like(rows, now), rows + now, columns + now], axis=1)
        behind = int(places[-1]) + 1
        out[behind:] = (np.arange(length - behind) + now + max(height, width))[:, None]
    return out


def _kept_slots(kept: KeptImage, block_size: int) -> IntArray:
    """Where the rows of an image are kept, [num_rows]."""
    block, offset = np.divmod(np.arange(len(kept.image.places)), block_size)
    return (np.asarray(kept.blocks, np.int32)[block] * block_size + offset).astype(np.int32)


def _with_class(vision: VisionSpec, patches: FloatArray) -> FloatArray:
    """The patches, behind a row for what is learned."""
    return np.concatenate([np.zeros_like(patches[:1]), patches]) if vision.has_class else patches


def _layout(vision: VisionSpec, grid: tuple[int, int]) -> Mapping[str, npt.NDArray[Any]]:
    """Of one image, by patch in the order in which the encoder reads them."""
    height, width = grid
    merge, size = vision.merge, vision.window // vision.patch_size // vision.merge
    square_rows, square_columns = np.divmod(np.arange(height // merge * (width // merge)), width // merge)
    windows = np.zeros(1, np.int64)
    order = np.arange(len(square_rows))
    if size:
        owner = square_rows // size * (-(-width // merge) + 1) + square_columns // size
        order = np.argsort(owner, kind="stable")
        windows = np.flatnonzero(np.diff(owner[order], prepend=-1)) * merge**2
    inside = np.arange(merge**2)
    rows = (square_rows[order, None] * merge + inside // merge).ravel()
    columns = (square_columns[order, None] * merge + inside % merge).ravel()
    patches = (order[:, None] * merge**2 + inside).ravel()
    # Rows for the decoder come square by square, wherever windows put them.
    squares = np.argsort(order)[:, None] * merge**2 + inside
    shift = int(vision.has_class)
    side = round((vision.encoder.num_learned_positions - shift) ** 0.5)
    positions = _bucket(height, side)[rows] * side + _bucket(width, side)[columns] if side else rows
    own = side * side if vision.class_last else 0
    layout: dict[str, npt.NDArray[Any]] = {
        "order": patches,
        "squares": squares,
        "windows": windows,
        "positions": positions,
        "places": np.stack([rows, columns], axis=1) + vision.first_place,
    }
    if vision.num_corners:
        layout |= _corners(vision, height, width, rows, columns)
    if shift:
        layout["order"] = np.concatenate([[0], patches + 1])
        layout["squares"] = squares + 1
        layout["positions"] = np.concatenate([[own], positions + (not vision.class_last)])
        layout["places"] = np.concatenate([np.zeros((1, 2), np.int64), layout["places"]])
        layout["class_rows"] = np.concatenate([[0], np.full(len(patches), -1)])
    if vision.extra_rows > 0:
        layout["squares"] = np.concatenate([[[0]], layout["squares"]])
    elif vision.extra_rows < 0:
        layout["squares"] = squares[1:]
    return layout


def _bucket(count: int, side: int) -> npt.NDArray[np.int64]:
    """Which of `side` learned positions each of `count` patches has (NaViT, Dehghani et al. 2023), in float32 as the
    models were trained."""
    bounds = np.arange(1 / side, 1.0, 1 / side).astype(np.float32) if side else np.zeros(0, np.float32)
    places = np.arange(count, dtype=np.float32) * (np.float32(1) / np.float32(count))
    return np.asarray(np.searchsorted(bounds, np.minimum(places, np.float32(1 - 1e-6)), side="right"), np.int64)


def _corners(
    vision: VisionSpec, height: int, width: int, rows: npt.NDArray[Any], columns: npt.NDArray[Any]
) -> dict[str, npt.NDArray[Any]]:
    """The learned positions around each patch, and how much of each it takes."""
    side = round(vision.num_corners**0.5)
    (near_rows, down), (near_columns, across) = (
        (_cubic if vision.is_bicubic else _linear)(count, side, places)
        for count, places in ((height, rows), (width, columns))
    )
    found: dict[str, npt.NDArray[Any]] = {}
    for n, (i, j) in enumerate(np.ndindex(len(near_rows), len(near_columns))):
        found |= {f"corner_{n}": near_rows[i] * side + near_columns[j], f"weight_{n}": down[i] * across[j]}
    return found


def _linear(count: int, side: int, places: npt.NDArray[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Along one side of `count` patches: the two of `side` positions around each place, and their shares. The first
    and last patch lie on the first and last position."""
    at = np.linspace(0, side - 1, count, dtype=np.float32)[places]
    first = at.astype(np.int64)
    share = at - first
    return (first, np.minimum(first + 1, side - 1)), (1 - share, share)


def _cubic(count: int, side: int, places: npt.NDArray[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """The four around each place, by cubic convolution (Keys 1981, a = -0.75); the outer edges of both coincide."""
    at = (places + np.float32(0.5)) / np.float32(count) * np.float32(side) - np.float32(0.5)
    first = np.floor(at).astype(np.int64)
    share, a = (at - first).astype(np.float32), np.float32(-0.75)

    def near(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return np.asarray(((a + 2) * x - (a + 3)) * x * x + 1, np.float32)

    def far(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return np.asarray(((a * x - 5 * a) * x + 8 * a) * x - 4 * a, np.float32)

    weights = (far(share + 1), near(share), near(1 - share), far(2 - share))
    return tuple(np.clip(first + n, 0, side - 1) for n in (-1, 0, 1, 2)), weights
