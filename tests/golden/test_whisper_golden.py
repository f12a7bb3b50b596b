"""Whisper-base hears what espeak-ng says as transformers does; needs espeak-ng and the packages of the weights."""

import difflib
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import LLM, TranscriptionParams
from headrace.core.audio.decode import read_audio
from headrace.core.errors import RequestError
from whisper_base import missing_packages, whisper_base

if missing_packages() or shutil.which("espeak-ng") is None:
    pytest.skip(missing_packages() or "espeak-ng is not installed", allow_module_level=True)
pytestmark = pytest.mark.slow

ENGLISH = (
    "Hello. My name is Alice and I live in a small town near the river. "
    "Every morning I walk to the market and buy fresh bread."
)
GERMAN = "Guten Morgen. Ich wohne in einer kleinen Stadt am Fluss und kaufe jeden Tag frisches Brot."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whisper_base(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> tuple[Any, Any]:
    """transformers' model and processor of the same files."""
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    model: Any = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), WhisperProcessor.from_pretrained(folder)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), device="cpu", dtype="float32", kv_memory="400MiB", max_num_seqs=4) as opened:
        yield opened


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def say(text: str, voice: str, path: Path) -> Path:
    """The text as espeak-ng speaks it."""
    subprocess.run(["espeak-ng", "-v", voice, "-s", "150", "-w", str(path), text], check=True)
    return path


def heard_by_transformers(oracle: tuple[Any, Any], path: Path, **options: Any) -> tuple[str, list[Any]]:
    """Text and (start, end) of its pieces: none without timestamps."""
    model, processor = oracle
    features = processor(read_audio(path), sampling_rate=16_000, return_tensors="pt").input_features
    with torch.inference_mode():
        tokens = model.generate(features, num_beams=1, do_sample=False, **options)[0].tolist()
    said = processor.decode(tokens, skip_special_tokens=True, output_offsets=bool(options.get("return_timestamps")))
    if isinstance(said, str):
        return said.strip(), []
    return said["text"].strip(), [piece["timestamp"] for piece in said["offsets"]]


@pytest.mark.parametrize(("text", "voice", "language"), [(ENGLISH, "en-us", "en"), (GERMAN, "de", "de")])
def test_the_text_is_that_of_transformers(
    llm: LLM, oracle: tuple[Any, Any], tmp_path: Path, text: str, voice: str, language: str
) -> None:
    path = say(text, voice, tmp_path / "say.wav")
    expected, _ = heard_by_transformers(oracle, path)
    assert difflib.SequenceMatcher(None, words(text), words(expected)).ratio() > 0.5  # not one word again and again
    one = llm.transcribe(path)[0]
    assert one.language == language
    assert one.text.strip() == expected


def test_text_and_times_are_those_of_transformers(llm: LLM, oracle: tuple[Any, Any], tmp_path: Path) -> None:
    path = say(ENGLISH, "en-us", tmp_path / "say.wav")
    expected, times = heard_by_transformers(oracle, path, return_timestamps=True)
    one = llm.transcribe(path, TranscriptionParams(timestamps=True))[0]
    assert one.text.strip() == expected
    assert one.language == "en"
    assert len(times) == len(one.segments) >= 2
    np.testing.assert_allclose([(segment.start, segment.end) for segment in one.segments], times, atol=1e-6)


def test_an_unknown_language_and_an_empty_recording_are_errors(llm: LLM) -> None:
    with pytest.raises(RequestError, match="no language 'klingon'"):
        llm.transcribe(np.zeros(16_000, np.float32), TranscriptionParams(language="klingon"))
    with pytest.raises(RequestError, match="no sound"):
        llm.transcribe(np.zeros(0, np.float32))
