"""From what users give to pictures: files, bytes, data: URLs, http(s) URLs where they are allowed, Pillow's own."""

import base64
import binascii
import io
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import RequestError
from ..extras import missing_package
from ..units import format_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_PARTS = ("image", "image_url", "input_image", "image_pil")
"""Types of a message's parts that are images, as several APIs spell them."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "JPEG2000", "PPM", "ICO", "TGA", "AVIF")
"""What is read. Pillow knows others, for some of which (EPS) it starts programs on what a client sent."""
_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """What a request's images may be. allow_files, allow_remote: paths, and http(s) URLs; allow_private: of machines
    that the internet does not reach, too."""

    max_images: int = 64
    max_bytes: int = 64 * 1024**2
    max_pixels: int = 2**27
    allow_files: bool = True
    allow_remote: bool = True
    allow_private: bool = True


def read_image(source: Any, limits: ImageLimits) -> "Image":
    """A picture in RGB, turned as its camera was held, on white where it is transparent. source: a picture of Pillow,
    bytes of a file, a path, or a text that is a data: or http(s) URL or a path. Raises RequestError."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise missing_package(error, "reading images") or error from error
    if isinstance(source, Image.Image):
        picture = source
    else:
        data, name = _read_bytes(source, limits)
        if len(data) > limits.max_bytes:
            raise _wrong(f"{name} has {format_bytes(len(data))}; {format_bytes(limits.max_bytes)} are allowed")
        Image.init()
        formats = [format for format in FORMATS if format in Image.OPEN]
        try:
            picture = Image.open(io.BytesIO(data), formats=formats)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:  # before we can count
            raise _wrong(f"{name} has too many pixels; {limits.max_pixels} are allowed") from error
        except Exception as error:  # decoders of many formats raise what they like
            raise _wrong(f"{name} is no image that Pillow can read in the formats {', '.join(formats)}") from error
    if picture.width * picture.height > limits.max_pixels:
        raise _wrong(f"an image of {picture.width} x {picture.height} pixels; {limits.max_pixels} are allowed")
    try:
        return _in_rgb(ImageOps.exif_transpose(picture))
    except Exception as error:
        raise _wrong(f"an image is damaged: {error}") from error


def _in_rgb(picture: "Image") -> "Image":
    """Pillow itself cuts 16 bits off at 255 and shows what colour lies under transparent places, mostly black."""
    from PIL import Image

    if picture.mode.startswith("I"):
        return Image.fromarray((np.clip(np.asarray(picture), 0, 65535) >> 8).astype(np.uint8)).convert("RGB")
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
    return picture.convert("RGB")


def take_images(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Messages with {"type": "image"} in the place of each image, and the images, as `read_image` takes them.

    Raises RequestError for a part that says it is an image and holds none.
    """
    taken: list[Any] = []
    plain: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list) or not any(map(_is_image, content)):
            plain.append(message if isinstance(message, dict) else message)  # type: ignore[arg-type]
            continue
        parts = []
        for part in content:
            if _is_image(part):
                taken.append(_source(part))
                part = {"type": "image"}
            parts.append(part)
        plain.append({**message, "content": parts})
    return plain, taken


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS


def _source(part: Mapping[str, Any]) -> Any:
    for value in _values(part):
        if isinstance(value, Mapping):
            value = value.get("url")
        if value is not None:
            return value
    raise _wrong(f"a part of the type {part['type']!r} holds no image")


def _values(part: Mapping[str, Any]) -> Iterator[Any]:
    if (data := part.get("base64")) is not None:
        yield f"data:;base64,{data}"
    for key in ("image_url", "image", "image_pil", "url", "path"):
        yield part.get(key)


def _read_bytes(source: Any, limits: ImageLimits) -> tuple[bytes, str]:
    """The bytes of an image file, and what errors call it."""
    if isinstance(source, bytes | bytearray):
        return bytes(source), "the image"
    text = str(source) if isinstance(source, str | Path) else ""
    scheme = text.partition(":")[0].lower() if isinstance(source, str) and ":" in text[:10] else ""
    if scheme == "data":
        return _from_data_url(text), "the image"
    if scheme in ("http", "https"):
        if not limits.allow_remote:
            raise RequestError(
                "images at http(s) addresses are not fetched by this server",
                code="remote_media_not_allowed",
                remedies=["a data: URL", "HEADRACE_ALLOW_REMOTE_MEDIA=1 headrace serve"],
            )
        return _fetch(text, limits), text[:200]
    if not text or not limits.allow_files:
        what = "text that is no URL" if text else "text of no length" if source == "" else type(source).__name__
        what = f"{scheme}: URL" if scheme else what
        raise _wrong(f"an image must be a data: URL{' or bytes' if limits.allow_files else ''}, got a {what}")
    path = Path(text.removeprefix("file://"))
    try:
        with path.open("rb") as file:
            return file.read(limits.max_bytes + 1), str(path)
    except OSError as error:
        raise _wrong(f"{path} cannot be read: {error.strerror}") from error


def _from_data_url(url: str) -> bytes:
    """As browsers read them: what is escaped, wrapped or lacks its last = is fine."""
    head, _, body = url.partition(",")
    try:
        data = urllib.parse.unquote_to_bytes(body) if "%" in body else body.encode()
        if not head.lower().endswith(";base64"):
            return data
        data = data.translate(None, b" \t\n\f\r")
        return base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise _wrong(f"a data: URL is damaged: {error}") from error


def _fetch(url: str, limits: ImageLimits) -> bytes:
    from .fetch import FetchError, fetch

    try:
        return fetch(url, max_bytes=limits.max_bytes, timeout_s=_TIMEOUT_S, allow_private=limits.allow_private)
    except FetchError as error:
        raise _wrong(f"{url[:200]} cannot be fetched: {error}") from error


def _wrong(reason: str) -> RequestError:
    return RequestError(reason, code="invalid_image")
