"""Progress of a download, seen from the outside: how much has arrived on disk.

A bar on a terminal, a line now and then elsewhere. Watching the disk works alike for every tool that fetches.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .units import format_bytes

Report = Callable[[str], None]
"""Takes one line about what is being done, for the user."""

_LINE_EVERY_S = 10.0


@contextmanager
def watch_growth(label: str, total_bytes: int, measure: Callable[[], int], report: Report) -> Iterator[None]:
    """While the block runs, show `measure()` of `total_bytes`. Both count bytes; measure must not raise."""
    stop = threading.Event()
    show = _show_bar if sys.stderr.isatty() else _show_lines
    thread = threading.Thread(target=show, args=(label, total_bytes, measure, report, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def bytes_under(folder: Path, pattern: str = "*") -> int:
    """Bytes in the files of a folder (links not counted) whose names match; files may come and go meanwhile."""
    total = 0
    for path in folder.rglob(pattern):
        try:
            if not path.is_symlink() and path.is_file():
                total += path.stat().st_size
        except OSError:
            continue  # renamed since it was listed
    return total


def _show_bar(label: str, total: int, measure: Callable[[], int], report: Report, stop: threading.Event) -> None:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(label, total=total, completed=min(measure(), total))
        while not stop.wait(0.2):
            progress.update(task, completed=min(measure(), total))
        progress.update(task, completed=min(measure(), total))


def _show_lines(label: str, total: int, measure: Callable[[], int], report: Report, stop: threading.Event) -> None:
    last = time.monotonic()
    while not stop.wait(0.2):
        if time.monotonic() - last >= _LINE_EVERY_S:
            last = time.monotonic()
            done = min(measure(), total)
            report(f"{label}: {format_bytes(done)} of {format_bytes(total)} ({100 * done // max(total, 1)} %)")
