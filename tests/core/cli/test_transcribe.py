"""`headrace transcribe`: the whole command on a tiny Whisper."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.core.cli import exits
from headrace.core.cli.transcribe import command
from tiny_speech import recording, tiny_whisper


def test_text_and_segments_of_a_file(tmp_path: Path) -> None:
    folder = tiny_whisper(tmp_path / "tiny")
    (tmp_path / "a.wav").write_bytes(recording(1.5))
    arguments = [str(folder), str(tmp_path / "a.wav"), "--device", "reference", "--load-format", "dummy"]
    arguments += ["--kv-memory", "32MiB", "--max-num-seqs", "2", "--language", "de"]
    result = CliRunner().invoke(command, [*arguments, "--json"], catch_exceptions=False)
    (entry,) = json.loads(result.stdout)["transcriptions"]
    assert entry["language"] == "de" and entry["duration_s"] == 1.5 and entry["segments"]
    subtitles = CliRunner().invoke(command, [*arguments, "--format", "vtt"], catch_exceptions=False)
    assert subtitles.stdout.startswith("WEBVTT\n\n00:00:")
    assert subtitles.stdout.count(" --> ") == len(entry["segments"])


@pytest.mark.parametrize(("name", "said"), [("none.wav", "does not exist"), ("", "is a directory")])
def test_a_wrong_path_is_told_before_a_model_is_loaded(tmp_path: Path, name: str, said: str) -> None:
    result = CliRunner().invoke(command, ["no/model", str(tmp_path / name)])
    assert result.exit_code == 2 and said in result.output


def test_a_broken_file_is_told_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.wav").write_bytes(recording(1.5))
    (tmp_path / "b.wav").write_bytes(b"")

    def load(config: object) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr("headrace.core.cli.transcribe.start_llm", load)
    assert exits.run(["transcribe", "no/model", str(tmp_path / "a.wav"), str(tmp_path / "b.wav")]) == 2
    assert "b.wav is empty" in capsys.readouterr().err
