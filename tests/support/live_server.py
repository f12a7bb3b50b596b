"""`headrace serve` as a process of its own, with its log."""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil

_PROGRAM = "from headrace.core.cli import main; main()"


class LiveServer:
    """A running server. `url` is there once it is ready; leaving the block ends it."""

    def __init__(
        self,
        model: Path | str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        device: str = "null",
        wait: bool = True,
        port: int = 0,
    ) -> None:
        options = ["--device", device, "--port", str(port), *arguments]
        if device == "null":
            options += ["--load-format", "dummy"]
        self.lines: list[str] = []
        self._fresh: queue.Queue[str] = queue.Queue()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, "serve", str(model), *options],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if wait:
            try:
                self.url = self.wait_for(r"serving .* at (\S+)")[1]
                self.wait_for(r"ready in")
            except BaseException:
                self.close()
                raise

    def wait_for(self, pattern: str, timeout_s: float = 120.0) -> re.Match[str]:
        """The next line of the log that matches."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                line = self._fresh.get(timeout=max(0.01, min(0.2, deadline_s - time.monotonic())))
            except queue.Empty:
                ended = self.process.poll() is not None and self._fresh.empty() and not self._reader.is_alive()
                if ended or time.monotonic() > deadline_s:
                    raise AssertionError(f"no line like {pattern!r} in:\n" + "\n".join(self.lines)) from None
                continue
            found = re.search(pattern, line)
            if found is not None:
                return found

    @property
    def engine(self) -> psutil.Process:
        """The engine's process."""
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def metric(self, name: str, **labels: str) -> float:
        """One figure of /metrics."""
        return self.metrics()[name + "".join(f"|{k}={v}" for k, v in sorted(labels.items()))]

    def metrics(self) -> dict[str, float]:
        """All figures, by name and labels other than the model's."""
        from prometheus_client.parser import text_string_to_metric_families

        found: dict[str, float] = {}
        for family in text_string_to_metric_families(httpx.get(f"{self.url}/metrics").text):
            for sample in family.samples:
                labels = sorted((k, v) for k, v in sample.labels.items() if k != "model_name")
                found[sample.name + "".join(f"|{k}={v}" for k, v in labels)] = sample.value
        return found

    def wait_idle(self, timeout_s: float = 20.0) -> None:
        """Until no request is left and all blocks are free."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            found = self.metrics()
            if not found["headrace_unfinished_requests"] and (
                found["headrace_kv_blocks"] == found["headrace_kv_blocks_free"]
            ):
                return
            assert time.monotonic() < deadline_s, found
            time.sleep(0.05)

    def follow_example(self, files: Any = None) -> httpx.Response:
        """The request that the log proposes, sent with these files where it sends one."""
        (url, data), *more = (
            found.groups() for line in self.lines if (found := re.search(r"try: curl (\S+) (.*)", line))
        )
        assert not more
        if files is not None:
            assert data == "-F file=@speech.wav"
            return httpx.post(url, files=files, timeout=120)
        return httpx.post(url, content=data.removeprefix("-d ").strip("'"), timeout=120)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """A request with a JSON body."""
        return httpx.post(f"{self.url}{path}", json=body, timeout=120, **options)

    def terminate(self, timeout_s: float = 60.0) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def close(self) -> None:
        """End it, however it is."""
        children = psutil.Process(self.process.pid).children() if self.process.poll() is None else []
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for child in children:
            if child.is_running():
                child.kill()
        self._reader.join(5)

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr:
            for line in self.process.stderr:
                self.lines.append(line.rstrip("\n"))
                self._fresh.put(line.rstrip("\n"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
