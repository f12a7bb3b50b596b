"""Whisper's front end: from samples to frames of a log-mel spectrogram, in numpy."""

import functools
import math

import numpy as np
import numpy.typing as npt

from ..stages import FloatArray

SAMPLE_RATE = 16_000
WINDOW_S = 30
WINDOW_SAMPLES = WINDOW_S * SAMPLE_RATE
HOP = 160
FRAMES_PER_S = SAMPLE_RATE // HOP
WINDOW_FRAMES = WINDOW_S * FRAMES_PER_S
_FFT = 400


def log_mel(samples: FloatArray, num_mel_bins: int) -> FloatArray:
    """Frames of 10 ms, float32 [num_frames, num_mel_bins]; samples: float32 [num_samples] at 16 kHz.

    Sound of up to 30 s is filled up with silence to 30 s. Power spectra of Hann windows of 25 ms, mel bands
    (Slaney's scale, of equal area), log10, cut to 80 dB below the loudest and scaled as Whisper was trained.
    """
    padded = np.pad(samples.astype(np.float64), (0, max(0, WINDOW_SAMPLES - len(samples))))
    padded = np.pad(padded, _FFT // 2, mode="reflect")
    num_frames = (len(padded) - _FFT) // HOP  # the last one is not used
    frames = np.lib.stride_tricks.sliding_window_view(padded, _FFT)[::HOP][:num_frames]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_FFT) / _FFT)
    bands = mel_bands(num_mel_bins)
    mel = np.empty((num_frames, num_mel_bins))
    for start in range(0, num_frames, WINDOW_FRAMES):  # hours of sound would take gigabytes at once
        part = slice(start, start + WINDOW_FRAMES)
        mel[part] = np.square(np.abs(np.fft.rfft(frames[part] * window))) @ bands
    log = np.log10(np.maximum(mel, 1e-10))
    scaled: FloatArray = ((np.maximum(log, log.max() - 8.0) + 4.0) / 4.0).astype(np.float32)
    return scaled


@functools.cache
def mel_bands(num_mel_bins: int) -> npt.NDArray[np.float64]:
    """Triangles over the spectrum, [_FFT / 2 + 1, num_mel_bins]."""
    top = _to_mel(SAMPLE_RATE / 2)
    edges = np.array([_to_hertz(top * i / (num_mel_bins + 1)) for i in range(num_mel_bins + 2)])
    frequencies = np.linspace(0, SAMPLE_RATE / 2, _FFT // 2 + 1)[:, None]
    rising = (frequencies - edges[:-2]) / np.diff(edges)[:-1]
    falling = (edges[2:] - frequencies) / np.diff(edges)[1:]
    bands: npt.NDArray[np.float64] = np.maximum(0, np.minimum(rising, falling)) * (2.0 / (edges[2:] - edges[:-2]))
    return bands


_LINEAR_HERTZ = 1000.0
"""The scale is linear up to here, with 15 mel a kilohertz, and logarithmic above."""
_STEP = math.log(6.4) / 27.0


def _to_mel(hertz: float) -> float:
    if hertz < _LINEAR_HERTZ:
        return 3.0 * hertz / 200.0
    return 15.0 + math.log(hertz / _LINEAR_HERTZ) / _STEP


def _to_hertz(mel: float) -> float:
    return 200.0 * mel / 3.0 if mel < 15.0 else _LINEAR_HERTZ * math.exp(_STEP * (mel - 15.0))
