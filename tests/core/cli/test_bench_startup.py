"""bench startup: real processes by turns, what is counted of them, and commands that fail."""

import json
import sys
from pathlib import Path

import pytest

from headrace.core.cli import exits
from headrace.core.cli.bench_startup import time_start
from headrace.core.config import EngineConfig, SchedulerConfig
from tiny_server_model import tiny_server_model


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_server_model(tmp_path_factory.mktemp("startup") / "tiny")


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_start_is_timed_until_its_first_byte_and_its_end() -> None:
    start = time_start(_python("import time; print('x', flush=True); time.sleep(0.2); print('y' * 200_000)"), {})
    assert start.end_s - start.first_output_s >= 0.2
    silent = time_start(_python("pass"), {})
    assert silent.first_output_s == silent.end_s > 0


def test_peak_memory_is_the_process_own() -> None:
    """It is never less than what the test's own process had when it started the child, so that is subtracted."""
    small = time_start(_python("pass"), {}).peak_rss_bytes
    size = small + (64 << 20)
    large = time_start(_python(f"x = b'1' * {size}"), {}).peak_rss_bytes
    assert size <= large < 2 * size + small


def test_two_engines_by_turns(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, copy = tmp_path / "log", tmp_path / "copy.json"
    script = tmp_path / "other engine.py"
    script.write_text(f"open({str(log)!r}, 'a').write('started '); print('token')")
    arguments = [
        "bench",
        "startup",
        str(tiny_model),
        "--device",
        "null",
        "--load-format",
        "dummy",
        "--kv-memory",
        "16MiB",
    ]
    arguments += ["--runs", "2", "--versus", f"{sys.executable} '{script}'", "--output", str(copy), "--json"]
    assert exits.run(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert json.loads(copy.read_text()) == result
    assert (result["model"], result["device"], result["num_runs"]) == (str(tiny_model), "null", 2)
    assert log.read_text().split() == ["started"] * 3  # the cold one, and two that count
    ours, theirs = result["engines"]["headrace"], result["engines"]["versus"]
    for engine in (ours, theirs):
        assert len(engine["runs"]) == 2
        for name in ("first_output_s", "end_s", "peak_rss_bytes"):
            values = [run[name] for run in engine["runs"]]
            assert engine["median"][name] == pytest.approx(sum(values) / 2)
            assert result["ratios"][name] == pytest.approx(theirs["median"][name] / ours["median"][name])
        assert 0 < engine["cold"]["first_output_s"] <= engine["cold"]["end_s"]


@pytest.mark.parametrize(
    ("versus", "code", "reason"),
    [
        ("/no/such/engine -n 1", 2, "cannot start /no/such/engine: No such file or directory"),
        ("'", 2, "--versus ': No closing quotation"),
        (" ", 2, "--versus takes a command line"),
        (f"{sys.executable} -c 'raise SystemExit(\"no model\")'", 1, "ended with 1:\nno model"),
    ],
)
def test_a_command_that_fails(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], versus: str, code: int, reason: str
) -> None:
    arguments = [
        "bench",
        "startup",
        str(tiny_model),
        "--device",
        "null",
        "--load-format",
        "dummy",
        "--kv-memory",
        "16MiB",
    ]
    assert exits.run([*arguments, "--runs", "1", "--versus", versus]) == code
    assert reason in capsys.readouterr().err


def test_the_configuration_reaches_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.core.cli.bench_child import child_environment

    monkeypatch.setenv("HEADRACE_MAX_NUM_SEQS", "3")
    environment = child_environment(EngineConfig(scheduler=SchedulerConfig(seed=7)))
    assert environment["HEADRACE_SEED"] == "7"
    assert environment["HEADRACE_MAX_NUM_SEQS"] == str(EngineConfig().scheduler.max_num_seqs)
