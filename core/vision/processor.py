"""Pixels by the checkpoint's own image processor, and the prompt with room for what the encoder makes of them."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError, RequestError
from ..models.spec import VisionSpec
from ..stages import FloatArray, ImageInput
from ..text.tokenizer import Tokenizer
from .images import REMEDY, ImageLimits, read_image


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What the encoder reads at once; see ImageInput."""

    patches: FloatArray
    grid: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptStyle:
    """How a family's prompts mark an image.

    placeholder: what users and chat templates write, "" for the token that rows stand in the place of. before, after:
    around the rows. tiles: an image's tiles are laid out in rows and columns, and the whole image comes last.
    bos_behind: all images come first, then the begin of sequence, and the prompt ends a line (PaliGemma).
    """

    placeholder: str = ""
    before: str = ""
    after: str = ""
    tiles: bool = False
    bos_behind: bool = False


STYLES: Mapping[str, PromptStyle] = {
    "gemma3": PromptStyle(placeholder="<start_of_image>", before="\n\n<start_of_image>", after="<end_of_image>\n\n"),
    "idefics3": PromptStyle(tiles=True),
    "paligemma": PromptStyle(bos_behind=True),
    "smolvlm": PromptStyle(tiles=True),
}
"""By model_type; others write the token of rows alone."""


class ImageReader:
    """Prepares prompts with images for one model. May be used by several threads."""

    def __init__(
        self, *, folder: Path, model_type: str, vision: VisionSpec, tokenizer: Tokenizer | None, limits: ImageLimits
    ) -> None:
        self._folder = folder
        self._vision = vision
        self._tokenizer = tokenizer
        self._limits = limits
        self._style = STYLES.get(model_type, PromptStyle())
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
        images = [self._read(source) for source in sources]
        if isinstance(prompt, str):
            token_ids = self._tokens(self._expand(prompt, images), add_special_tokens and not self._style.bos_behind)
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
        tiles, (num_rows, num_columns) = image
        rows = [self._token * _num_rows(tile, self._vision) for tile in tiles]
        if not self._style.tiles:
            return f"{self._style.before}{''.join(rows)}{self._style.after}"
        around, whole = "<fake_token_around_image>", "<global-img>"
        text = ""
        for row in range(num_rows):
            for column in range(num_columns):
                text += f"{around}<row_{row + 1}_col_{column + 1}>{rows[row * num_columns + column]}"
            text += "\n"
        return text + ("\n" if num_rows else "") + f"{around}{whole}{rows[-1]}{around}"

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
    def _read(self, source: Any) -> "_Image":
        picture = read_image(source, self._limits)
        try:
            made = self._processor()(images=[picture], return_tensors="np", **self._options())
        except (ValueError, TypeError, ZeroDivisionError) as error:
            raise RequestError(
                f"an image of {picture.width} x {picture.height} pixels cannot be prepared: {error}",
                code="invalid_image",
            ) from error
        return _tiles(made, self._vision)

    def _options(self) -> Mapping[str, Any]:
        return {"return_row_col_info": True} if self._style.tiles else {}

    def _processor(self) -> Callable[..., Mapping[str, Any]]:
        with self._lock:
            if self._process is None:
                self._process = _load_processor(self._folder)
            return self._process


_Image = tuple[Sequence[Tile], tuple[int, int]]
"""The tiles of an image, and in how many rows and columns those lie that are parts of it."""


def _load_processor(folder: Path) -> Callable[..., Mapping[str, Any]]:
    try:
        from transformers import AutoImageProcessor
    except ImportError as error:
        raise RequestError(
            "images need transformers, which is not installed", code="not_supported", remedies=[REMEDY]
        ) from error
    try:
        # Pillow's arithmetic, whatever else is installed, so that pixels are the same everywhere.
        auto: Any = AutoImageProcessor
        loaded = auto.from_pretrained(str(folder), local_files_only=True, backend="pil")
    except Exception as error:  # whatever it raises, images cannot be read
        raise RequestError(
            f"the image processor of {folder} cannot be loaded: {error}", code="not_supported", remedies=[REMEDY]
        ) from error
    return loaded  # type: ignore[no-any-return]


def _tiles(made: Mapping[str, Any], vision: VisionSpec) -> _Image:
    """One image as processors of several kinds give it."""
    pixels = np.asarray(made["pixel_values"], np.float32)
    if "image_grid_thw" in made:
        _, height, width = np.asarray(made["image_grid_thw"])[0].tolist()
        return [Tile(patches=pixels, grid=(height, width))], (0, 0)
    pixels = pixels.reshape(-1, *pixels.shape[-3:])
    shape = (0, 0)
    if "rows" in made and len(pixels) > 1:
        shape = (int(np.ravel(made["rows"][0])[0]), int(np.ravel(made["cols"][0])[0]))
    return [_cut(tile, vision) for tile in pixels], shape


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
    return len(tile.patches) // vision.merge**2


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
        ImageInput(patches=tile.patches, grid=tile.grid, places=part) for tile, part in zip(tiles, parts, strict=True)
    ]
