"""Runs probes in child processes, side by side, with a time limit: whatever they do, the caller goes on."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO, Any, Literal

from .platform import Status
from .probe_child import LAUNCH

TIMEOUT_S = 10.0
"""Seconds that one import or one detection may take; HEADRACE_PROBE_TIMEOUT_S overrides it."""
_POLL_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing to try. check: import the plugin `target`; detect: call the function `target`."""

    action: Literal["check", "detect"]
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How it went: OK with the child's answer, or BROKEN, CRASHED or TIMEOUT with the reason."""

    status: Status
    reason: str = ""
    answer: dict[str, Any] = field(default_factory=dict)


def probe_timeout_s() -> float:
    """The time limit: HEADRACE_PROBE_TIMEOUT_S if that is a positive number, else TIMEOUT_S."""
    try:
        seconds = float(os.environ.get("HEADRACE_PROBE_TIMEOUT_S", ""))
    except ValueError:
        return TIMEOUT_S
    return seconds if 0 < seconds < float("inf") else TIMEOUT_S


def run_children(tasks: Sequence[Task], timeout_s: float) -> list[Outcome]:
    """Try each task in a child process of its own; all run at the same time. Order is kept."""
    with ExitStack() as stack:
        children = [stack.enter_context(_Child(task)) for task in tasks]
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s and any(child.running() for child in children):
            time.sleep(_POLL_S)
        return [child.outcome(timeout_s) for child in children]


class _Child:
    """One child process and its three files. Files, not pipes: a forgotten grandchild that keeps a pipe open
    would keep us waiting."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __enter__(self) -> "_Child":
        self._files: list[IO[bytes]] = [tempfile.TemporaryFile() for _ in range(3)]
        request, self._result, self._output = self._files
        text = {
            "action": self.task.action,
            "target": self.task.target,
            "result_fd": self._result.fileno(),
            "sys_path": sys.path,
        }
        request.write(json.dumps(text).encode())
        request.seek(0)
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH],
            stdin=request,
            stdout=self._output,
            stderr=self._output,
            pass_fds=(self._result.fileno(),),
            start_new_session=True,
        )
        return self

    def __exit__(self, *error: object) -> None:
        if self.running():
            # The child leads a process group of its own; what it started ends with it.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for file in self._files:
            file.close()

    def running(self) -> bool:
        return self._process.poll() is None

    def outcome(self, timeout_s: float) -> Outcome:
        doing = "loading it" if self.task.action == "check" else f"its detection {self.task.target}"
        if self.running():
            return Outcome(status=Status.TIMEOUT, reason=f"{doing} did not finish within {timeout_s:g} s")
        answer = self._answer()
        if answer is None:
            reason = f"{doing} ended the process: {_cause(self._process.returncode)}{self._last_words()}"
            return Outcome(status=Status.CRASHED, reason=reason)
        if "error" in answer:
            return Outcome(status=Status.BROKEN, reason=f"{doing} failed: {answer['error']}")
        return Outcome(status=Status.OK, answer=answer)

    def _answer(self) -> dict[str, Any] | None:
        self._result.seek(0)
        try:
            answer = json.loads(self._result.read())
        except ValueError:
            return None
        return answer if isinstance(answer, dict) else None

    def _last_words(self) -> str:
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - 2000))
        lines = [line.strip() for line in self._output.read().decode(errors="replace").splitlines()]
        last = next((line for line in reversed(lines) if line.isprintable() and line), "")
        return f"; its last output: {last[:200]}" if last else ""


def _cause(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
