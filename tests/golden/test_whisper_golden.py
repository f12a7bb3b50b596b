"""Whisper-base on synthesised speech, against transformers' own pipeline; needs espeak-ng and two packages."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import LLM
from headrace.core.audio.decode import read_audio
from headrace.core.audio.whisper import TranscriptionParams
from headrace.core.errors import RequestError
from whisper_base import missing_packages, whisper_base

if missing_packages() or shutil.which("espeak-ng") is None:
    pytest.skip(missing_packages() or "espeak-ng is not installed", allow_module_level=True)
pytestmark = pytest.mark.slow

ENGLISH = "Hello. My name is Alice and I live in a small town near the river. I buy fresh bread every morning."
GERMAN = "Guten Morgen. Heute scheint die Sonne, und wir gehen zusammen in den Garten."
STORY = " ".join(
    f"Chapter {number}. The old man walked along the road to the village, and he met {count} of his friends there."
    for number, count in (("one", "two"), ("two", "seven"), ("three", "ten"), ("four", "five"), ("five", "nine"))
)


def speak(text: str, voice: str, path: Path) -> Path:
    subprocess.run(["espeak-ng", "-v", voice, "-s", "150", "-w", str(path), text], check=True)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return whisper_base(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), device="cpu", dtype="float32", kv_memory="400MiB", max_num_seqs=4) as opened:
        yield opened


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    model: Any = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    processor: Any = WhisperProcessor.from_pretrained(folder)

    def transcribe(samples: Any, **options: Any) -> Any:
        inputs = (
            {"truncation": False, "padding": "longest", "return_attention_mask": True}
            if len(samples) > 480_000
            else {}
        )
        features = processor(samples, sampling_rate=16_000, return_tensors="pt", **inputs)
        with torch.inference_mode():
            return model.generate(
                **features, return_segments=True, num_beams=1, do_sample=False, **options
            ), processor

    return transcribe


def test_short_speech_equals_transformers(llm: LLM, oracle: Any, tmp_path: Path) -> None:
    files = [speak(ENGLISH, "en-us", tmp_path / "en.wav"), speak(GERMAN, "de", tmp_path / "de.wav")]
    found = llm.transcribe(files)
    assert [one.language for one in found] == ["en", "de"]
    for path, one in zip(files, found, strict=True):
        expected, processor = oracle(read_audio(path))
        assert one.text == processor.batch_decode(expected["sequences"], skip_special_tokens=True)[0].strip()
    assert "small town near the river" in found[0].text and "Sonne" in found[1].text


def test_translation_equals_transformers(llm: LLM, oracle: Any, tmp_path: Path) -> None:
    path = speak(GERMAN, "de", tmp_path / "de.wav")
    one = llm.transcribe(path, TranscriptionParams(task="translate", language="German"))[0]
    expected, processor = oracle(read_audio(path), task="translate", language="de")
    assert one.text == processor.batch_decode(expected["sequences"], skip_special_tokens=True)[0].strip()
    assert "sun" in one.text.lower()


def test_long_speech_is_heard_by_windows_as_transformers_hears_it(llm: LLM, oracle: Any, tmp_path: Path) -> None:
    path = speak(STORY, "en-us", tmp_path / "story.wav")
    samples = read_audio(path)
    assert len(samples) > 480_000
    one = llm.transcribe(path)[0]
    expected, processor = oracle(samples, return_timestamps=True)
    segments = expected["segments"][0]
    texts = [processor.decode(segment["tokens"], skip_special_tokens=True) for segment in segments]
    assert [segment.text for segment in one.segments] == texts
    times = [(float(segment["start"]), float(segment["end"])) for segment in segments]
    found = [time for segment in one.segments for time in (segment.start, segment.end)]
    assert found == pytest.approx([time for pair in times for time in pair], abs=0.011)
    assert one.duration_s == pytest.approx(len(samples) / 16_000)
    assert len(one.segments) > 3 and one.segments[-1].end > 30


def test_silence_is_left_out_where_a_threshold_says_so(llm: LLM) -> None:
    silence = np.zeros(16_000 * 4, np.float32)
    params = TranscriptionParams(language="en", no_speech_threshold=0.3, logprob_threshold=None, timestamps=True)
    assert llm.transcribe(silence, params)[0].text == ""


def test_an_unknown_language_and_an_empty_recording_are_errors(llm: LLM) -> None:
    with pytest.raises(RequestError, match="no language 'klingon'"):
        llm.transcribe(np.zeros(16_000, np.float32), TranscriptionParams(language="klingon"))
    with pytest.raises(RequestError, match="no sound"):
        llm.transcribe(np.zeros(0, np.float32))
