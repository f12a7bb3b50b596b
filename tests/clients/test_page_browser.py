"""The page in headless Chromium: what it does and shows, idle, busy and in error, wide and narrow.

HEADRACE_PICTURES names a folder for the pictures; look at them after a change of the page.
"""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from client_env import run_client, start_client
from live_server import LiveServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (Path("/usr/bin/chromium").exists() and shutil.which("chromedriver")),
        reason="no /usr/bin/chromium or no chromedriver (apt-get install chromium chromium-driver)",
    ),
]


@pytest.fixture
def pictures(tmp_path: Path) -> str:
    """Where the pictures go."""
    folder = Path(os.environ.get("HEADRACE_PICTURES", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


@contextmanager
def load(url: str, num_streams: int) -> Iterator[None]:
    """Streams with one long prefix and ends of their own, begun again as they finish."""
    is_over = threading.Event()
    prefix = "The same beginning for all of them, which fills a good many blocks. " * 8

    def stream(number: int) -> None:
        round_ = 0
        with httpx.Client(timeout=60) as client:
            while not is_over.is_set():
                round_ += 1
                prompt = f"{prefix} {number} {round_} " + f"own words {number} " * (5 + number)
                body = {"prompt": prompt, "max_tokens": 30 + number, "ignore_eos": True, "stream": True}
                with client.stream("POST", f"{url}/v1/completions", json=body) as response:
                    for _ in response.iter_lines():
                        if is_over.is_set():
                            break

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(num_streams)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def test_chat(model_folder: Path, slow_steps: dict[str, str], pictures: str) -> None:
    with LiveServer(model_folder, "--kv-memory", "16MiB", env=slow_steps, device="moody") as server:
        run_client("browser", "page.py", "chat", server.url, pictures)
        server.wait_idle()


def test_busy(model_folder: Path, slow_steps: dict[str, str], pictures: str) -> None:
    with LiveServer(model_folder, "--kv-memory", "16MiB", env=slow_steps, device="moody") as server:
        with load(server.url, 40):
            run_client("browser", "page.py", "busy", server.url, pictures)
        server.wait_idle()


def test_key(model_folder: Path, slow_steps: dict[str, str], pictures: str) -> None:
    with LiveServer(model_folder, "--api-key", "secret", env=slow_steps, device="moody") as server:
        run_client("browser", "page.py", "keyed", server.url, pictures)


def test_the_server_goes_away(model_folder: Path, slow_steps: dict[str, str], pictures: str) -> None:
    with (
        LiveServer(model_folder, "--kv-memory", "16MiB", env=slow_steps, device="moody") as server,
        start_client("browser", "page.py", "gone", server.url, pictures) as browser,
    ):
        try:
            assert browser.stdout is not None
            line = browser.stdout.readline()
            assert line == "answering\n", line + browser.stdout.read()
            server.process.kill()
            output, _ = browser.communicate(timeout=60)
            assert browser.returncode == 0, output
        finally:
            browser.kill()
