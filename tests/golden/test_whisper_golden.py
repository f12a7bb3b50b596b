"""Whisper-base hears what espeak-ng says; needs espeak-ng and the two packages that carry the weights."""

import difflib
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace import LLM, TranscriptionParams
from headrace.core.errors import RequestError
from whisper_base import missing_packages, whisper_base

if missing_packages() or shutil.which("espeak-ng") is None:
    pytest.skip(missing_packages() or "espeak-ng is not installed", allow_module_level=True)
pytestmark = pytest.mark.slow

ENGLISH = (
    "Hello. My name is Alice and I live in a small town near the river. "
    "Every morning I walk to the market and buy fresh bread."
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = whisper_base(tmp_path_factory.mktemp("whisper"))
    with LLM(str(folder), device="cpu", dtype="float32", kv_memory="400MiB", max_num_seqs=4) as opened:
        yield opened


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def test_most_words_are_heard_in_their_order(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "say.wav"
    subprocess.run(["espeak-ng", "-v", "en-us", "-s", "150", "-w", str(path), ENGLISH], check=True)
    one = llm.transcribe(path, TranscriptionParams(timestamps=True))[0]
    assert one.language == "en"
    assert difflib.SequenceMatcher(None, words(ENGLISH), words(one.text)).ratio() > 0.8
    assert len(one.segments) >= 2 and one.segments[0].end <= one.segments[1].start <= one.duration_s


def test_an_unknown_language_and_an_empty_recording_are_errors(llm: LLM) -> None:
    with pytest.raises(RequestError, match="no language 'klingon'"):
        llm.transcribe(np.zeros(16_000, np.float32), TranscriptionParams(language="klingon"))
    with pytest.raises(RequestError, match="no sound"):
        llm.transcribe(np.zeros(0, np.float32))
