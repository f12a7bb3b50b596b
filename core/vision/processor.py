"""Pixels by the checkpoint's own image processor, and the prompt with room for what the encoder makes of them."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError, RequestError
from ..extras import extra_remedy, missing_package
from ..models.vision_spec import VisionSpec
from ..stages import FloatArray, ImageInput, IntArray
from ..text.tokenizer import Tokenizer
from .anyres import rows_of_tiles
from .images import ImageLimits, read_image
from .styles import Layout, style_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What the encoder reads at once, or tiles that an image is put together from; see ImageInput."""

    patches: FloatArray
    grid: tuple[int, int]
    num_tiles: int = 1
    shape: int = 0
    rows: IntArray | None = None
    weights: FloatArray | None = None


class ImageReader:
    """Prepares prompts with images for one model. May be used by several threads."""

    def __init__(
        self, *, folder: Path, model_type: str, vision: VisionSpec, tokenizer: Tokenizer | None, limits: ImageLimits
    ) -> None:
        self._folder = folder
        self._vision = vision
        self._tokenizer = tokenizer
        self._limits = limits
        self._style = style_of(model_type, vision.encoder.model_type)
        self._lock = threading.Lock()
        self._process: Callable[..., Mapping[str, Any]] | None = None

    @property
    def placeholder(self) -> str:
        """What stands in a prompt where an image goes."""
        return self._style.placeholder or self._token

    def prepare(
        self, prompt: str | Sequence[int], sources: Sequence[Any], *, add_special_tokens: bool = True
    ) -> tuple[list[int], list[ImageInput]]:
        """Token ids of a prompt that has one placeholder for each image, with the images at their places.

        sources: as `read_image` takes them. Raises RequestError.
        """
        if len(sources) > self._limits.max_images:
            raise RequestError(
                f"{len(sources)} images in one request; {self._limits.max_images} are allowed", code="too_many_images"
            )
        images = self._read(sources)
        if isinstance(prompt, str):
            text = self._expand(prompt, images)
            if self._style.bos_before_text and add_special_tokens:
                text, add_special_tokens = self._with_bos(text), False
            token_ids = self._tokens(text, add_special_tokens and not self._style.bos_behind)
        else:
            token_ids = self._expand_ids(list(prompt), images)
        return token_ids, _at_places(token_ids, [tile for tiles, _ in images for tile in tiles], self._vision)

    def with_placeholders(self, prompt: str, count: int) -> str:
        """The prompt, behind as many placeholders as it lacks."""
        return self.placeholder * max(0, count - prompt.count(self.placeholder)) + prompt

    # ---- prompts ----------------------------------------------------------------------------------------------
    def _expand(self, prompt: str, images: Sequence["_Image"]) -> str:
        pieces = prompt.split(self.placeholder)
        if len(pieces) - 1 != len(images):
            raise RequestError(
                f"the prompt has {len(pieces) - 1} places for images ({self.placeholder}), and {len(images)} images "
                "were given",
                code="invalid_image",
            )
        pieces = [self._without_token(piece) for piece in pieces]
        if self._style.bos_behind:
            bos = self._need_tokenizer().special_tokens.get("bos_token", "")
            pieces[-1] = f"{bos}{pieces[-1]}\n"
        return pieces[0] + "".join(self._rows(image) + piece for image, piece in zip(images, pieces[1:], strict=True))

    def _with_bos(self, text: str) -> str:
        """Text with the begin of sequence behind the images that it begins with, if it has none."""
        bos = self._need_tokenizer().special_tokens.get("bos_token", "")
        rest = text
        while rest.startswith(self._token):
            rest = rest.removeprefix(self._token)
        return text if bos in text else text.removesuffix(rest) + bos + rest

    def _without_token(self, text: str) -> str:
        """Text in which nothing else claims to be a row of an image."""
        return text.replace(self._token, "") if self._style.placeholder else text

    def _expand_ids(self, token_ids: list[int], images: Sequence["_Image"]) -> list[int]:
        """The same of a prompt in token ids. One in which every row has its token already is taken as it is."""
        rows = sum(_num_rows(tile, self._vision) for tiles, _ in images for tile in tiles)
        if token_ids.count(self._vision.image_token_id) == rows:
            return token_ids
        placeholder = self._need_tokenizer().token_id(self.placeholder)
        if placeholder is None or token_ids.count(placeholder) != len(images):
            raise RequestError(
                f"the prompt needs the token {self.placeholder} once for each of {len(images)} images, or the token "
                f"{self._vision.image_token_id} once for each of their {rows} rows",
                code="invalid_image",
            )
        found: list[int] = []
        rest = iter(images)
        for token in token_ids:
            found += self._tokens(self._rows(next(rest)), False) if token == placeholder else [token]
        return found

    def _rows(self, image: "_Image") -> str:
        """What takes the placeholder's place."""
        tiles, layout = image
        return self._style.write([self._token * _num_rows(tile, self._vision) for tile in tiles], layout)

    @property
    def _token(self) -> str:
        token: str | None = self._need_tokenizer().backend.id_to_token(self._vision.image_token_id)
        if token is None:
            raise ModelError(f"the tokenizer has no token {self._vision.image_token_id}, which stands for images")
        return token

    def _tokens(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._need_tokenizer().encode(text, add_special_tokens)

    def _need_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError("a text needs a tokenizer, and skip_tokenizer_init is set", code="no_tokenizer")
        return self._tokenizer

    # ---- pixels -----------------------------------------------------------------------------------------------
    def _read(self, sources: Sequence[Any]) -> list["_Image"]:
        pictures = [read_image(source, self._limits) for source in sources]
        if self._style.by_prompt and len(pictures) > 1:
            made = self._prepare_pixels([pictures], pictures)
            pixels = np.asarray(made["pixel_values"], np.float32)
            return [_one_image({"pixel_values": tiles}, self._vision) for tiles in pixels]
        return [_one_image(self._prepare_pixels([picture], [picture]), self._vision) for picture in pictures]

    def _prepare_pixels(self, given: Sequence[Any], pictures: Sequence[Any]) -> Mapping[str, Any]:
        """given: the pictures as the processor takes them."""
        options = dict(self._style.options)
        if self._vision.encoder.model_type == "pixtral":
            options["patch_size"] = {
                side: self._vision.patch_size * self._vision.merge for side in ("height", "width")
            }
        try:
            return self._processor()(images=given, return_tensors="np", **options)
        except (ValueError, TypeError, ZeroDivisionError) as error:
            sizes = ", ".join(f"{picture.width} x {picture.height}" for picture in pictures)
            raise RequestError(
                f"an image of {sizes} pixels cannot be prepared: {error}", code="invalid_image"
            ) from error

    def _processor(self) -> Callable[..., Mapping[str, Any]]:
        with self._lock:
            if self._process is None:
                self._process = _load_processor(self._folder)
            return self._process


_Image = tuple[Sequence[Tile], Layout]
"""The tiles of an image, and how those lie that are parts of it."""


def _load_processor(folder: Path) -> Callable[..., Mapping[str, Any]]:
    try:
        from transformers import AutoImageProcessor
    except ImportError as error:
        raise missing_package(error, "reading images") or error from error
    try:
        # Pillow's arithmetic, whatever else is installed, so that pixels are the same everywhere.
        auto: Any = AutoImageProcessor
        loaded = auto.from_pretrained(str(folder), local_files_only=True, backend="pil")
    except Exception as error:  # whatever it raises, images cannot be read
        raise RequestError(
            f"the image processor of {folder} cannot be loaded: {error}",
            code="not_supported",
            remedies=[extra_remedy("PIL")],
        ) from error
    return loaded  # type: ignore[no-any-return]


def _one_image(made: Mapping[str, Any], vision: VisionSpec) -> _Image:
    """One image as processors of several kinds give it."""
    pixels = np.asarray(made["pixel_values"], np.float32)
    if "image_grid_thw" in made:
        _, height, width = np.asarray(made["image_grid_thw"])[0].tolist()
        return [Tile(patches=pixels, grid=(height, width))], (0, 0)
    tiles = [_cut(tile, vision) for tile in pixels.reshape(-1, *pixels.shape[-3:])]
    if vision.is_crossed:
        count, shape = int(np.ravel(made["num_tiles"][0])[0]), int(np.ravel(made["aspect_ratio_ids"])[0])
        patches = np.concatenate([tile.patches for tile in tiles[:count]])
        return [Tile(patches=patches, grid=tiles[0].grid, num_tiles=count, shape=shape)], (0, 0)
    if vision.has_newline:
        size = np.asarray(made["image_sizes"])[0].tolist() if len(tiles) > 1 else (0, 0)
        return [_put_together(tiles, size, vision)], (0, 0)
    layout = (tiles[0].grid[0] // vision.merge, tiles[0].grid[1] // vision.merge)
    if len(tiles) > 1:
        layout = (0, 0)
    if "rows" in made:
        layout = (int(np.ravel(made["rows"][0])[0]), int(np.ravel(made["cols"][0])[0])) if len(tiles) > 1 else (0, 0)
    if "aspect_ratios" in made:
        layout = tuple(np.asarray(made["aspect_ratios"])[0].tolist())
    return tiles, layout


def _put_together(tiles: Sequence[Tile], size: tuple[int, int], vision: VisionSpec) -> Tile:
    """An image whose rows are those of its tiles, line by line. size: of the picture, height and width."""
    rows, weights = rows_of_tiles(vision, len(tiles), size)
    patches = np.concatenate([tile.patches for tile in tiles])
    return Tile(patches=patches, grid=tiles[0].grid, num_tiles=len(tiles), rows=rows, weights=weights)


def _cut(pixels: FloatArray, vision: VisionSpec) -> Tile:
    """[num_channels, height, width] -> patches, square by square."""
    size, merge = vision.patch_size, vision.merge
    channels, height, width = pixels.shape
    rows, columns = height // size, width // size
    squares = pixels[:, : rows * size, : columns * size].reshape(
        channels, rows // merge, merge, size, columns // merge, merge, size
    )
    patches = squares.transpose(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, channels * size * size)
    return Tile(patches=np.ascontiguousarray(patches), grid=(rows, columns))


def _num_rows(tile: Tile, vision: VisionSpec) -> int:
    if vision.is_crossed:
        return 1
    if tile.rows is not None:
        return len(tile.rows)
    return len(tile.patches) // vision.merge**2 + vision.extra_rows


def _at_places(token_ids: Sequence[int], tiles: Sequence[Tile], vision: VisionSpec) -> list[ImageInput]:
    """The tiles at the places of their rows, in order."""
    places = np.flatnonzero(np.asarray(token_ids) == vision.image_token_id).astype(np.int32)
    counts = [_num_rows(tile, vision) for tile in tiles]
    if sum(counts) != len(places):
        raise RequestError(
            f"the images have {sum(counts)} rows, and the prompt has {len(places)} places for them",
            code="invalid_image",
        )
    parts = np.split(places, np.cumsum(counts)[:-1]) if counts else []
    return [
        ImageInput(
            patches=tile.patches,
            grid=tile.grid,
            places=part,
            num_tiles=tile.num_tiles,
            shape=tile.shape,
            rows=tile.rows,
            weights=tile.weights,
        )
        for tile, part in zip(tiles, parts, strict=True)
    ]
