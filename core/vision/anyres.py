"""An image put together from tiles (LLaVA-NeXT): which row of them stands where, line by line."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ..models.vision_spec import VisionSpec
from ..stages import FloatArray, IntArray

NEWLINE = -1
"""In the place of a row: the learned one behind a line."""
_LEAST_SHRINK = 1.1


def rows_of_tiles(vision: VisionSpec, num_tiles: int, size: tuple[int, int]) -> tuple[IntArray, FloatArray | None]:
    """Rows [n, 1] of the tiles, or [n, 4] with the weight of each, for the places of an image.

    The first tile is the whole image; the others are the parts of the image at its best resolution, whose padding is
    left out, each line ending with the learned row. With more lines than max_tiles have, rows are interpolated.
    size: height and width of the picture.
    """
    side = round((vision.encoder.num_learned_positions - vision.has_class) ** 0.5)
    whole = np.arange(side * side, dtype=np.int32)[:, None]
    if num_tiles == 1:
        return np.concatenate([whole, [[NEWLINE]]]).astype(np.int32), None
    pixels = side * vision.patch_size
    height, width = (length // pixels for length in best_resolution(size, vision.resolutions))
    tiles = np.arange(height * width * side * side, dtype=np.int32).reshape(height, width, side, side)
    lines = _without_padding(tiles.swapaxes(1, 2).reshape(height * side, width * side) + side * side, size)
    shrink = math.sqrt(lines.size / (vision.max_tiles * side * side)) if vision.max_tiles else 1.0
    if shrink <= _LEAST_SHRINK:
        ends = np.full((len(lines), 1), NEWLINE, np.int32)
        return np.concatenate([whole, np.concatenate([lines, ends], axis=1).reshape(-1, 1)]), None
    rows, weights = _shrink(lines, (int(lines.shape[0] // shrink), int(lines.shape[1] // shrink)))
    ones = np.eye(4)[np.zeros(len(whole), np.int64)]
    return (
        np.concatenate([np.pad(whole, ((0, 0), (0, 3)), constant_values=NEWLINE), _with_ends(rows, NEWLINE)]).astype(
            np.int32
        ),
        np.concatenate([ones, _with_ends(weights, 0)]).astype(np.float32),
    )


def best_resolution(size: tuple[int, int], resolutions: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """The resolution at which most of the picture's pixels are left, and of these the one that wastes least."""
    best, most, least = resolutions[0], 0, math.inf
    for height, width in resolutions:
        scale = min(width / size[1], height / size[0])
        kept = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
        wasted = height * width - kept
        if kept > most or (kept == most and wasted < least):
            best, most, least = (height, width), kept, wasted
    return best


def _without_padding(lines: IntArray, size: tuple[int, int]) -> IntArray:
    """The lines of a picture that was scaled to fit, and padded on both sides."""
    height, width = lines.shape
    if size[1] / size[0] > width / height:
        padding = (height - int(round(size[0] * (width / size[1]), 7))) // 2
        return lines[padding : height - padding]
    padding = (width - int(round(size[1] * (height / size[0]), 7))) // 2
    return lines[:, padding : width - padding]


def _shrink(lines: IntArray, shape: tuple[int, int]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
    """Bilinear interpolation: rows and weights [height, width, 4] of the four rows around each."""
    (top, bottom, down), (left, right, across) = (
        _between(count, wanted) for count, wanted in zip(lines.shape, shape, strict=True)
    )
    rows = [lines[y[:, None], x[None, :]] for y in (top, bottom) for x in (left, right)]
    shares = [y[:, None] * x[None, :] for y in (1 - down, down) for x in (1 - across, across)]
    return np.stack(rows, axis=-1), np.stack(shares, axis=-1)


def _between(count: int, wanted: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The two neighbours of each of `wanted` places among `count`, and the share of the second."""
    places = np.maximum((np.arange(wanted) + 0.5) * (count / wanted) - 0.5, 0)
    first = places.astype(np.int64)
    return first, np.minimum(first + 1, count - 1), places - first


def _with_ends(lines: npt.NDArray[Any], end: int) -> npt.NDArray[Any]:
    """[height, width, 4] with one more column, as [n, 4]."""
    return np.pad(lines, ((0, 0), (0, 1), (0, 0)), constant_values=end).reshape(-1, 4)
