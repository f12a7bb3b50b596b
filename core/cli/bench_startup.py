"""The measurements of `headrace bench startup`: whole processes, from their start to the first text they write."""

import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..config import EngineConfig
from ..errors import ConfigError, HeadraceError
from .bench_child import PROGRAM, child_environment

_ERROR_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One process. peak_rss_bytes is the system's count for it and its children; it is at least what this process
    had when it started it, some 50 MiB."""

    first_output_s: float
    """until its first byte on stdout; until its end if it wrote none"""
    end_s: float
    peak_rss_bytes: int


def measure_startup(config: EngineConfig, *, prompt: str, runs: int, versus: str | None) -> dict[str, Any]:
    """`runs` starts of `headrace complete` with one token of output, and of another command line by turns.

    The first start of each stands apart: it may read its files from disk. Ratios are of medians, above 1 if headrace
    is better. Raises ConfigError for a command that cannot be started, HeadraceError for one that fails.
    """
    from headrace import __version__

    commands: dict[str, Sequence[str]] = {"headrace": (*PROGRAM, "complete", prompt, "--max-tokens", "1")}
    if versus is not None:
        commands["versus"] = _words(versus)
    environment = child_environment(config)
    starts: dict[str, list[Start]] = {name: [] for name in commands}
    for turn in range(runs + 1):
        order = list(commands.items())
        for name, command in order if turn % 2 == 0 else reversed(order):
            starts[name].append(time_start(command, environment if name == "headrace" else dict(os.environ)))
    engines = {
        name: {
            "command": shlex.join(commands[name]),
            "cold": asdict(first),
            "median": _medians(later),
            "runs": [asdict(start) for start in later],
        }
        for name, (first, *later) in starts.items()
    }
    return {
        "headrace": __version__,
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "model": config.model.model,
        "device": config.device.device,
        "num_runs": runs,
        "engines": engines,
        "ratios": _ratios(engines),
    }


def time_start(command: Sequence[str], environment: Mapping[str, str]) -> Start:
    """Run a command line to its end. Raises ConfigError, HeadraceError."""
    with tempfile.TemporaryFile() as errors:
        started_s = time.perf_counter()
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=environment
            )
        except OSError as error:
            raise ConfigError(f"cannot start {command[0]}: {error.strerror}") from None
        assert process.stdout is not None
        try:
            output = process.stdout.fileno()
            has_text = bool(os.read(output, 1))
            first_s = time.perf_counter() - started_s
            while os.read(output, 65536):
                pass
            # Popen.wait would not say what the process used.
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            process.stdout.close()
            if process.returncode is None:
                process.kill()
                process.wait()
        end_s = time.perf_counter() - started_s
        if process.returncode:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").splitlines()[-_ERROR_LINES:]
            raise HeadraceError("\n".join([f"{shlex.join(command)} ended with {process.returncode}:", *lines]))
    unit = 1 if sys.platform == "darwin" else 1024
    return Start(
        first_output_s=first_s if has_text else end_s, end_s=end_s, peak_rss_bytes=int(usage.ru_maxrss) * unit
    )


def _words(command: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise ConfigError(f"--versus {command}: {error}") from None
    if not words:
        raise ConfigError("--versus takes a command line", remedies=["--versus 'llama-cli -m model.gguf -n 1 -p Hi'"])
    return words


def _medians(starts: Sequence[Start]) -> dict[str, float]:
    rows = [asdict(start) for start in starts]
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def _ratios(engines: Mapping[str, Any]) -> dict[str, float]:
    if "versus" not in engines:
        return {}
    ours, theirs = engines["headrace"]["median"], engines["versus"]["median"]
    return {name: theirs[name] / max(ours[name], 1e-9) for name in ours}
