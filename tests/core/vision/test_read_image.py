"""Files of images as clients send them: damaged, odd, hostile; what comes of them is compared with Pillow's parts."""

import base64
import io
import struct
import subprocess
import urllib.parse
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from headrace.core.errors import RequestError
from headrace.core.vision.images import ImageLimits, read_image
from vision_cases import picture

LIMITS = ImageLimits(max_pixels=10_000, max_bytes=10**6)
PICTURE = picture(1, 64, 48)


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def png_of(width: int, height: int) -> bytes:
    """A file that says it has so many pixels, and has none."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


PNG, JPEG = encoded(PICTURE, "PNG"), encoded(PICTURE, "JPEG")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "no image that Pillow can read"),
        (PNG[:20], "no image"),
        (PNG[: len(PNG) // 2], "damaged: image file is truncated"),
        (PNG[:40] + bytes([PNG[40] ^ 255]) + PNG[41:], "no image|damaged"),
        (JPEG[:10], "no image"),
        (JPEG[: len(JPEG) // 2], "damaged: image file is truncated"),
        (encoded(PICTURE, "WEBP")[:60], "no image"),
        (encoded(PICTURE, "GIF")[:100], "no image|damaged"),
        (b"P6 64 64 255\naaaaa", "damaged: image file is truncated"),
        (png_of(0, 0), "no image"),
        (png_of(101, 100), "101 x 100 pixels; 10000 are allowed"),
        (png_of(60_000, 60_000), "too many pixels; 10000 are allowed"),
        (png_of(2**31 - 1, 2**31 - 1), "too many pixels|no image"),
        (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "no image that Pillow can read in the formats PNG, JPEG"),
        (b"%PDF-1.4\n", "no image"),
        (bytes(2 * 10**6), "976.6 KiB are allowed"),
    ],
)
def test_what_is_no_picture(data: bytes, problem: str) -> None:
    with pytest.raises(RequestError, match=problem) as error:
        read_image(data, LIMITS)
    assert error.value.code == "invalid_image"


def test_no_program_is_started_on_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow gives EPS to Ghostscript, where there is one."""
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a program was started"))
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", "/bin/true")
    with pytest.raises(RequestError, match="no image that Pillow can read"):
        read_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n", LIMITS)


@pytest.mark.parametrize("format", ["PNG", "WEBP", "BMP", "TIFF", "JPEG2000", "ICO", "PPM", "TGA"])
def test_formats(format: str) -> None:
    options = {"lossless": True} if format == "WEBP" else {"sizes": [PICTURE.size]} if format == "ICO" else {}
    read = read_image(encoded(PICTURE, format, **options), LIMITS)
    assert read.mode == "RGB" and np.array_equal(np.asarray(read), np.asarray(PICTURE))


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_several_pictures_the_first(format: str) -> None:
    first, second = PICTURE.quantize(64), picture(2, 64, 48).quantize(64)
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(first, format, save_all=True, append_images=[second], **options)
    assert np.array_equal(np.asarray(read_image(data, LIMITS)), np.asarray(first.convert("RGB")))


@pytest.mark.parametrize("orientation", range(10))
def test_turned_as_the_camera_was_held(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x112] = orientation
    pixels = np.asarray(PICTURE)
    turned = {
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
        5: pixels.transpose(1, 0, 2),
        6: np.rot90(pixels, -1),
        7: np.rot90(pixels.transpose(1, 0, 2), 2),
        8: np.rot90(pixels),
    }
    wanted = turned.get(orientation, pixels)
    assert np.array_equal(np.asarray(read_image(encoded(PICTURE, "PNG", exif=exif), LIMITS)), wanted)


@pytest.mark.parametrize("format", ["PNG", "TIFF", "PPM"])
def test_colours_of_16_bits(format: str) -> None:
    """Pillow's own conversion cuts them off at 255."""
    levels: npt.NDArray[np.uint16] = np.arange(4096, dtype=np.uint16).reshape(64, 64) * 16
    read = np.asarray(read_image(encoded(Image.fromarray(levels), format), LIMITS))
    assert np.array_equal(read, np.repeat((levels // 256)[..., None], 3, axis=2))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_places_are_white(mode: str) -> None:
    """Black letters on nothing are not black on black."""
    alpha = np.zeros((48, 64), np.uint8)
    alpha[10:20, 10:50] = 255
    letters = Image.fromarray(np.dstack([np.zeros((48, 64, 3), np.uint8), alpha]))
    data = encoded(letters.quantize(16) if mode == "P" else letters.convert(mode), "PNG")
    wanted = np.repeat(255 - alpha[..., None], 3, axis=2)
    assert np.array_equal(np.asarray(read_image(data, LIMITS)), wanted)
    half = Image.new("RGBA", (4, 4), (0, 0, 0, 128))
    assert np.asarray(read_image(encoded(half, "PNG"), LIMITS)).mean() == pytest.approx(127, abs=1)


@pytest.mark.parametrize("mode", ["CMYK", "L", "1", "YCbCr"])
def test_other_colours(mode: str) -> None:
    image = PICTURE.convert(mode)
    data = encoded(image, "JPEG" if mode == "CMYK" else "TIFF")
    wanted = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(np.asarray(read_image(data, LIMITS)), wanted)


@pytest.mark.parametrize("size", [(1, 1), (1, 64), (64, 1), (1, 10_000), (10_000, 1)])
def test_small_and_thin(size: tuple[int, int]) -> None:
    assert read_image(encoded(Image.new("L", size), "PNG"), LIMITS).size == size


BASE64 = base64.b64encode(PNG + b"\0").decode()  # with padding, and bytes behind the end, which are passed over


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{BASE64}",
        f"data:;base64,{BASE64}",
        f"data:text/plain;charset=utf-8;base64,{BASE64}",
        f"DATA:image/png;BASE64,{BASE64}",
        f"data:image/png;base64, {BASE64.rstrip('=')}",
        "data:image/png;base64," + base64.encodebytes(PNG).decode(),
        "data:image/png;base64," + urllib.parse.quote(BASE64, safe=""),
        "data:image/png," + urllib.parse.quote(PNG),
    ],
)
def test_data_urls(url: str) -> None:
    assert np.array_equal(np.asarray(read_image(url, LIMITS)), np.asarray(PICTURE))


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("data:", "no image"),
        ("data:image/png;base64", "no image"),
        ("data:image/png;base64,A", "a data: URL is damaged"),
        ("data:image/png;base64,\u00e9", "a data: URL is damaged"),
        ("data:image/png;base64,\ud800", "a data: URL is damaged"),
        ("data:image/png;base64,A\0A=", "a data: URL is damaged"),
        ("data:data:image/png;base64,AAAA", "no image"),
        ("", "must be a data: URL, got a text of no length"),
        (BASE64[:30], "got a text that is no URL"),
        ("ftp://a/b.png", "got a ftp: URL"),
        (5, "got a int"),
        ([], "got a list"),
    ],
)
def test_urls_that_are_none(url: Any, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        read_image(url, ImageLimits(allow_files=False, allow_remote=False))
