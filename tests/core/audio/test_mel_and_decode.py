"""Spectrograms against transformers' feature extractor, and sound files of every kind against what was written."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.core.audio.decode import read_audio, resample
from headrace.core.audio.mel import log_mel
from headrace.core.errors import RequestError


def sweep(seconds: float, rate: int = 16_000) -> Any:
    """A tone that rises to 3 kHz, with some noise."""
    times = np.arange(int(seconds * rate)) / rate
    noise = np.random.default_rng(0).standard_normal(len(times))
    return (0.3 * np.sin(2 * np.pi * (100 + 1450 * times / seconds) * times) + 0.01 * noise).astype(np.float32)


@pytest.mark.parametrize(("seconds", "bins"), [(2.5, 80), (30.0, 128), (41.3, 80), (0.01, 80)])
def test_frames_equal_those_of_transformers(seconds: float, bins: int) -> None:
    from transformers import WhisperFeatureExtractor

    samples = sweep(seconds)
    make: Any = WhisperFeatureExtractor
    extractor = make(feature_size=bins)
    options: dict[str, Any] = {"truncation": False, "padding": "longest"} if seconds > 30 else {}
    expected = extractor(samples, sampling_rate=16_000, return_tensors="np", **options).input_features[0].T
    found = log_mel(samples, bins)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=2e-4)


def wav(values: bytes, *, code: int, bits: int, channels: int = 1, rate: int = 16_000) -> bytes:
    """A WAV file by the book."""
    width = bits // 8 * channels
    form = struct.pack("<HHIIHH", code, channels, rate, rate * width, width, bits)
    extra = b"LIST" + struct.pack("<I", 3) + b"abc\0"  # of odd size, so padded
    body = (
        b"WAVE" + b"fmt " + struct.pack("<I", 16) + form + extra + b"data" + struct.pack("<I", len(values)) + values
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body


def test_wav_of_every_width() -> None:
    samples = sweep(0.2)
    scaled = {bits: np.round(samples.astype(np.float64) * (2 ** (bits - 1) - 1)) for bits in (8, 16, 24, 32)}
    files = {
        8: wav((scaled[8] + 128).astype(np.uint8).tobytes(), code=1, bits=8),
        16: wav(scaled[16].astype("<i2").tobytes(), code=1, bits=16),
        24: wav(scaled[24].astype("<i4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes(), code=1, bits=24),
        32: wav(scaled[32].astype("<i4").tobytes(), code=1, bits=32),
    }
    for bits, data in files.items():
        np.testing.assert_allclose(read_audio(data), samples, atol=2.0 ** (2 - bits) + 1e-6)
    np.testing.assert_array_equal(read_audio(wav(samples.tobytes(), code=3, bits=32)), samples)
    stereo = np.stack([samples, -samples], axis=1)
    assert not read_audio(wav(stereo.astype("<f8").tobytes(), code=3, bits=64, channels=2)).any()


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_a_tone_keeps_its_pitch_and_level_at_another_rate(rate: int) -> None:
    times = np.arange(rate) / rate
    found = resample(0.5 * np.sin(2 * np.pi * 440 * times), rate)
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
    assert len(found) == 16_000
    np.testing.assert_allclose(found[500:-500], expected[500:-500], atol=2e-3)


def test_what_the_new_rate_cannot_hold_is_gone() -> None:
    times = np.arange(48_000) / 48_000
    assert np.abs(resample(np.sin(2 * np.pi * 11_000 * times), 48_000)[500:-500]).max() < 1e-3


def test_flac_through_soundfile(tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile", reason="pip install 'headrace[audio]'")
    samples = sweep(0.5, 44_100)
    soundfile.write(tmp_path / "a.flac", samples, 44_100)
    np.testing.assert_allclose(read_audio(tmp_path / "a.flac"), resample(samples, 44_100), atol=1e-4)


def test_what_is_no_sound_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be decoded") as info:
        read_audio(b"this is text")
    assert "BytesIO" not in info.value.reason and "\n" not in info.value.reason
    with pytest.raises(RequestError, match="the audio is empty"):
        read_audio(b"")
    with pytest.raises(RequestError, match="NaN or infinite"):
        read_audio(wav(np.array([0.0, np.nan], "<f4").tobytes(), code=3, bits=32))
    with pytest.raises(RequestError, match="without sound"):
        read_audio(b"RIFF\0\0\0\0WAVEfmt ")
    with pytest.raises(RequestError, match="cannot be read: No such file"):
        read_audio(tmp_path / "none.wav")
    whole = wav(bytes(100), code=1, bits=16)
    with pytest.raises(RequestError, match="cut off: its header says 100 bytes of sound, 40 are there"):
        read_audio(whole[:-60])
    for unknown in (0x7FFFFFFF, 0xFFFFFFFF):  # as ffmpeg and sox write into a pipe
        streamed = whole.replace(b"data" + struct.pack("<I", 100), b"data" + struct.pack("<I", unknown))
        assert len(read_audio(streamed)) == len(read_audio(whole))
