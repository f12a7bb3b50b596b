"""From sound files to samples: WAV by itself, everything else by soundfile or ffmpeg, whichever is there."""

import io
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import RequestError
from ..stages import FloatArray
from .mel import SAMPLE_RATE

REMEDIES = ("pip install 'headrace[audio]'", "install ffmpeg", "convert it to WAV")
_FFMPEG_TIMEOUT_S = 300
_STREAMED_BYTES = 0x7FFF0000
"""A WAV file that a program wrote before it knew its length says this much or more."""


def read_audio(source: str | Path | bytes) -> FloatArray:
    """A sound file, or its bytes, as float32 [num_samples] at 16 kHz, channels averaged. Raises RequestError."""
    if isinstance(source, bytes):
        data, name = source, "the audio"
    else:
        name = str(source)
        try:
            data = Path(source).read_bytes()
        except OSError as error:
            raise RequestError(f"{name} cannot be read: {error.strerror}", code="invalid_audio") from error
    if not data:
        raise RequestError(f"{name} is empty", code="invalid_audio")
    is_wav = data[:4] == b"RIFF" and data[8:12] == b"WAVE"
    found = _read_wav(data, name) if is_wav else None
    samples = _read_other(data, name) if found is None else resample(*found)
    if not np.isfinite(samples).all():
        raise RequestError(f"{name} holds samples that are NaN or infinite", code="invalid_audio")
    return samples


def resample(samples: npt.NDArray[Any], rate: int) -> FloatArray:
    """Samples of any rate, float [num_samples] or [num_samples, num_channels], as float32 mono at 16 kHz.

    By a windowed sinc (Kaiser, 16 zeros on either side), so that nothing above the lower of both limits comes
    through. Raises RequestError for a rate that cannot be.
    """
    if samples.ndim == 2:
        samples = samples.mean(1)
    if samples.ndim != 1 or not 1000 <= rate <= 768_000:
        raise RequestError(f"sound of {rate} Hz and {samples.ndim} dimensions cannot be read", code="invalid_audio")
    if rate == SAMPLE_RATE or not len(samples):
        return samples.astype(np.float32)
    common = np.gcd(rate, SAMPLE_RATE)
    up, down = SAMPLE_RATE // common, rate // common
    width = 16 * max(up, down) / up  # input samples on either side
    reach = int(np.ceil(width))
    padded = np.pad(samples.astype(np.float64), (reach, reach + 1))
    count = -(-len(samples) * up // down)
    taps = np.arange(-reach, reach + 1)
    out = np.empty(count, np.float32)
    cut = min(1.0, up / down)
    for phase in range(min(up, count)):  # outputs of one phase have the same filter
        places = np.arange(phase, count, up)
        base, fraction = np.divmod(places[0] * down, up)
        distance = taps - fraction / up
        inside = np.clip(1 - (distance / width) ** 2, 0, None)
        kernel = cut * np.sinc(cut * distance) * np.i0(8.0 * np.sqrt(inside)) / np.i0(8.0)
        windows = np.lib.stride_tricks.sliding_window_view(padded, len(taps))[base::down][: len(places)]
        out[places] = windows @ kernel
    return out


def _read_wav(data: bytes, name: str) -> tuple[npt.NDArray[Any], int] | None:
    """(samples [num_samples, num_channels], rate) of plain numbers; None for a coding that others may know."""
    position, form = 12, None
    while position + 8 <= len(data):
        kind, size = struct.unpack_from("<4sI", data, position)
        body = data[position + 8 : position + 8 + size]
        if kind == b"fmt " and len(body) >= 16:
            code, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", body)
            if code == 0xFFFE and len(body) >= 26:  # extensible: the code is in front of a GUID
                (code,) = struct.unpack_from("<H", body, 24)
            form = (code, channels, rate, bits)
        if kind == b"data" and form is not None:
            if len(body) < size < _STREAMED_BYTES:
                reason = f"{name} is cut off: its header says {size} bytes of sound, {len(body)} are there"
                raise RequestError(reason, code="invalid_audio", remedies=["the whole file"])
            code, channels, rate, bits = form
            samples = _wav_samples(body, code, bits)
            if samples is None or not channels:
                return None
            return samples[: len(samples) // channels * channels].reshape(-1, channels), rate
        position += 8 + size + size % 2
    raise RequestError(f"{name} is a WAV file without sound", code="invalid_audio")


def _wav_samples(body: bytes, code: int, bits: int) -> npt.NDArray[Any] | None:
    kinds: dict[tuple[int, int], str] = {(1, 8): "u1", (1, 16): "<i2", (1, 32): "<i4", (3, 32): "<f4", (3, 64): "<f8"}
    if (code, bits) == (1, 24):
        count = len(body) // 3
        wide = np.zeros((count, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(body[: count * 3], np.uint8).reshape(count, 3)
        return wide.view("<i4")[:, 0] / 2.0**31
    if (code, bits) not in kinds:
        return None
    values = np.frombuffer(body[: len(body) * 8 // bits * bits // 8], kinds[code, bits])
    if code == 3:
        return values
    return (values.astype(np.float64) - 128) / 128 if bits == 8 else values / 2.0 ** (bits - 1)


def _read_other(data: bytes, name: str) -> FloatArray:
    reasons = []
    try:
        import soundfile
    except (ImportError, OSError):
        reasons.append("soundfile is not installed")
    else:
        try:
            samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
            return resample(samples, rate)
        except soundfile.LibsndfileError as error:
            reasons.append(f"soundfile: {error.error_string}")
    ffmpeg = shutil.which("ffmpeg")
    if ffmpeg is None:
        reasons.append("ffmpeg is not installed")
    else:
        command = [ffmpeg, "-nostdin", "-v", "error", "-i", "pipe:0", "-f", "f32le", "-ac", "1", "-ar", "16000", "-"]
        try:
            done = subprocess.run(command, input=data, capture_output=True, timeout=_FFMPEG_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            reasons.append(f"ffmpeg took more than {_FFMPEG_TIMEOUT_S} s")
        else:
            if done.returncode == 0 and done.stdout:
                return np.frombuffer(done.stdout, "<f4").astype(np.float32)
            said = done.stderr.decode(errors="replace").splitlines() or ["no samples"]
            reasons.append(f"ffmpeg: {said[-1].strip()[:200]}")
    raise RequestError(f"{name} cannot be decoded ({'; '.join(reasons)})", code="invalid_audio", remedies=REMEDIES)
