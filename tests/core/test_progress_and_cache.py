"""Progress as a bar and as lines; the cache folder, its lock, and room on the disk."""

import errno
import multiprocessing
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.core import progress
from headrace.core.cache import cache_folder, check_room, disk_error, lock, make_folder
from headrace.core.errors import CapacityError, ConfigError
from headrace.core.progress import bytes_under, watch_growth


def test_lines_when_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.0)
    lines: list[str] = []
    with watch_growth("model", 4 << 20, lambda: 1 << 20, lines.append):
        while not lines:
            time.sleep(0.01)
    assert set(lines) == {"model: 1.0 MiB of 4.0 MiB (25 %)"}
    assert capsys.readouterr().err == ""


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    lines: list[str] = []
    with watch_growth("model", 100, lambda: 120, lines.append):
        time.sleep(0.3)
    shown = capsys.readouterr()
    assert "model" in shown.err
    assert "100/100 bytes" in shown.err
    assert (shown.out, lines) == ("", [])


def test_an_error_in_the_block_passes_through() -> None:
    with pytest.raises(KeyboardInterrupt), watch_growth("model", 1, lambda: 0, lambda line: None):
        raise KeyboardInterrupt


def test_bytes_under_counts_files_and_no_links(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.part").write_bytes(b"123")
    (tmp_path / "y").write_bytes(b"45")
    (tmp_path / "link").symlink_to(tmp_path / "y")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    assert bytes_under(tmp_path) == 5
    assert bytes_under(tmp_path, "*.part") == 3
    assert bytes_under(tmp_path / "nothing") == 0


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HEADRACE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "headrace"
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/x")
    assert cache_folder() == Path("/var/x/headrace")
    monkeypatch.setenv("HEADRACE_CACHE", "~/mine")
    assert cache_folder() == tmp_path / "mine"


def test_room_is_checked_for_a_folder_that_does_not_exist_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(free=1 << 20)

    monkeypatch.setattr("shutil.disk_usage", usage)
    check_room(tmp_path / "a" / "b", 1 << 20, "it")
    with pytest.raises(CapacityError, match=r"it needs 2\.0 MiB on the disk of .*/a/b, 1\.0 MiB are free"):
        check_room(tmp_path / "a" / "b", 2 << 20, "it")
    assert asked == [tmp_path, tmp_path]


def test_disk_errors(tmp_path: Path) -> None:
    assert isinstance(disk_error(OSError(errno.ENOSPC, "x"), tmp_path), CapacityError)
    assert isinstance(disk_error(OSError(errno.EDQUOT, "x"), tmp_path / "a"), CapacityError)
    error = disk_error(PermissionError(errno.EACCES, "Permission denied"), tmp_path)
    assert isinstance(error, ConfigError)
    assert error.reason == f"cannot write to {tmp_path}: Permission denied"
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Not a directory"):
        make_folder(tmp_path / "file" / "folder")


def _hold(path: Path, started: str, seconds: float) -> None:
    with lock(path, lambda line: None):
        Path(started).touch()
        time.sleep(seconds)


def test_the_lock_waits_for_another_process(tmp_path: Path) -> None:
    path, started = tmp_path / "lock", tmp_path / "started"
    holder = multiprocessing.get_context("spawn").Process(target=_hold, args=(path, str(started), 0.5))
    holder.start()
    deadline_s = time.monotonic() + 20
    while not started.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    lines: list[str] = []
    with lock(path, lines.append):
        assert lines == [f"another process holds {path}; waiting for it"]
    holder.join()
