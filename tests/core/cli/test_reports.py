"""Commands that report: plan, models, download, version; the logs; the generated reference."""

import json
import logging
import re
import shlex
import signal
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import click
import pytest

from headrace.core import hub
from headrace.core.cli import exits
from headrace.core.cli.commands import command as group
from headrace.core.cli.logs import configure_logging
from headrace.core.cli.reference import with_reference
from headrace.core.config import LogConfig
from headrace.core.default_model import find_default_model
from headrace.core.hub import CachedModel, LocalModel
from headrace.core.settings import resolve_options
from headrace.core.units import format_bytes

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def restore_interrupt_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_reference_in_the_docs_is_current() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert page == with_reference(page), "run: python -m headrace.core.cli.reference docs/cli.md"


def _blocks(language: str) -> list[str]:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [text for tag, text in blocks if tag == language]


def test_commands_in_the_docs_can_be_parsed() -> None:
    lines = [line for line in _blocks("")[0].splitlines() if line]
    assert len(lines) >= 6
    for line in lines:
        _, name, *arguments = shlex.split(line.rpartition("| ")[2], comments=True)
        command = group.get_command(click.Context(group), name)
        assert command is not None
        command.make_context(name, arguments)


def test_the_file_in_the_docs_is_valid(tmp_path: Path) -> None:
    (tmp_path / "docs.toml").write_text(_blocks("toml")[0])
    config = resolve_options({}, config_file=tmp_path / "docs.toml", environ={})
    assert (config.model.max_model_len, config.kv.prefix_caching) == (4096, False)


def test_the_error_in_the_docs_is_what_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_MAX_MODEL_LENGTH", "5")
    assert exits.run(["complete", "x"]) == 2
    assert capsys.readouterr().err == _blocks("")[1]


# ---- plan -------------------------------------------------------------------------------------------------
def test_plan_prints_a_table(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exits.run(["plan", str(tiny_llama), "--memory", "64MiB", "--bandwidth", "1GB"]) == 0
    shown = capsys.readouterr().out
    assert "tiny-llama: llama, 2 layers" in shown
    assert "on the given memory: 64.0 MiB of 64.0 MiB free" in shown
    assert "4096 tokens" in shown
    assert "decode, one stream: at most" in shown
    assert shown.endswith("\nfits\n")


def test_plan_on_a_device(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exits.run(["plan", str(tiny_llama), "--device", "null", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] is True
    assert plan["target"].startswith("null")
    assert plan["groups"][0]["token_bytes"] == 2 * 2 * 2 * 16 * 4  # layers, K and V, heads, head_dim, float32


def test_plan_of_what_does_not_fit_exits_with_4(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exits.run(["plan", str(tiny_llama), "--memory", "100KiB", "--json"]) == 4
    shown = capsys.readouterr()
    assert json.loads(shown.out)["fits"] is False
    assert shown.err.startswith("error: tiny-llama does not fit on the given memory: weights")


@pytest.mark.parametrize("option", ["--memory", "--bandwidth"])
def test_plan_names_a_wrong_size(tiny_llama: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert exits.run(["plan", str(tiny_llama), option, "much"]) == 2
    assert f"error: {option} must be a size such as 8GiB" in capsys.readouterr().err


# ---- models and download ----------------------------------------------------------------------------------
def test_models_lists_size_and_fit(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = LocalModel(path=tiny_llama, kind="folder", name="acme/tiny")
    part = LocalModel(path=tiny_llama, kind="folder", name="acme/part")
    cached = [
        CachedModel(model=whole, num_bytes=3 << 20),
        CachedModel(model=part, num_bytes=1, missing="its weights are not in the cache"),
    ]
    monkeypatch.setattr(hub, "cached_models", lambda: cached)
    assert exits.run(["models", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [(entry["name"], entry["num_bytes"]) for entry in entries] == [("acme/tiny", 3 << 20), ("acme/part", 1)]
    assert entries[0]["fit"].startswith("fits on ")
    assert entries[1]["fit"] == "its weights are not in the cache"
    assert exits.run(["models"]) == 0
    assert "3.0 MiB" in capsys.readouterr().out


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_models_counts_a_gguf_file_as_the_device_keeps_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    """As `plan` does: the cpu platform multiplies Q4_1 as it is, the reference dequantizes it."""
    file = find_default_model()
    if file is None:
        pytest.skip("the default model is not here")
    model = LocalModel(path=file, kind="gguf", name="small")
    monkeypatch.setattr(hub, "cached_models", lambda: [CachedModel(model=model, num_bytes=file.stat().st_size)])
    assert exits.run(["models", "--device", device, "--json"]) == 0
    fit = json.loads(capsys.readouterr().out)[0]["fit"]
    assert exits.run(["plan", "SmolLM2-135M-Instruct", "--device", device, "--json"]) == 0
    weights = json.loads(capsys.readouterr().out)["weights_bytes"]
    assert fit == f"fits on {device} ({format_bytes(weights)} + KV)"
    assert (weights < 1.1 * file.stat().st_size) == (device == "cpu")


def test_models_when_there_are_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(hub, "cached_models", list)
    assert exits.run(["models"]) == 0
    shown = capsys.readouterr()
    assert (shown.out, "headrace download" in shown.err) == ("", True)
    assert exits.run(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_download_prints_where_the_model_is(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exits.run(["download", str(tiny_llama)]) == 0
    assert capsys.readouterr().out == f"{tiny_llama}\n"
    assert exits.run(["download", str(tiny_llama), "--json"]) == 0
    expected = {"name": "tiny-llama", "kind": "folder", "path": str(tiny_llama)}
    assert json.loads(capsys.readouterr().out) == expected


def test_an_unknown_model_exits_with_3(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["download"], ["plan", "--memory", "1GiB"], ["complete"]):
        name, *options = command
        arguments = [name, "no-such-model", *options, *(["x"] if name == "complete" else [])]
        assert exits.run(arguments) == 3
        error = capsys.readouterr().err
        assert "error: 'no-such-model' is neither a file or folder here nor a hub id (org/name)" in error


# ---- version ----------------------------------------------------------------------------------------------
def test_version_gives_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert exits.run(["version", "--json"]) == 0
    versions = json.loads(capsys.readouterr().out)
    assert versions["numpy"] == metadata.version("numpy")
    assert (versions["torch"] is not None) == any(d.name == "torch" for d in metadata.distributions())


# ---- logs -------------------------------------------------------------------------------------------------
@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    root, ours = logging.getLogger(), logging.getLogger("headrace")
    before = (list(root.handlers), root.level, ours.level)
    yield logging.getLogger("headrace.core.test")
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


def test_text_logs(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LogConfig())
    configure_logging(LogConfig())  # the second call replaces the first
    logger.info("loaded", extra={"fields": {"num_bytes": 5, "dtype": "a b", "load_s": 1.23456}})
    logger.warning("slow")
    logger.debug("not shown")
    logging.getLogger("other.library").info("not shown")
    shown = capsys.readouterr()
    first, second = shown.err.splitlines()
    assert first[8:] == ' loaded num_bytes=5 dtype="a b" load_s=1.23'
    assert second[8:] == " warning: slow"
    assert shown.out == ""


def test_json_logs(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LogConfig(log_format="json", log_level="debug"))
    logger.debug("loaded %d", 5, extra={"fields": {"load_s": 1.5, "path": Path("/x")}})
    try:
        raise ValueError("bad")
    except ValueError:
        logger.exception("failed")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "debug",
        "logger": "headrace.core.test",
        "message": "loaded 5",
        "load_s": 1.5,
        "path": "/x",
    }
    assert "ValueError: bad" in second["traceback"]
