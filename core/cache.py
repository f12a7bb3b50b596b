"""headrace's own cache folder, and what every writer into it needs: room, a lock, clear errors."""

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import CapacityError, ConfigError, HeadraceError
from .progress import Report
from .units import format_bytes


def cache_folder() -> Path:
    """HEADRACE_CACHE, or headrace in XDG_CACHE_HOME, or ~/.cache/headrace. It may not exist yet."""
    own = os.environ.get("HEADRACE_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headrace"


def make_folder(folder: Path) -> Path:
    """Create a folder of the cache. Raises ConfigError if that is not allowed, CapacityError if the disk is full."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, folder) from error
    return folder


def check_room(folder: Path, needed_bytes: int, what: str) -> None:
    """CapacityError if the disk that holds `folder` has not this much room. The folder may not exist yet."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        raise CapacityError(
            f"{what} needs {format_bytes(needed_bytes)} on the disk of {folder}, {format_bytes(free)} are free",
            remedies=_remedies(),
        )


def disk_error(error: OSError, place: Path) -> HeadraceError:
    """An error of writing to the disk as one of ours: a full disk is a CapacityError, all else a ConfigError."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(place if place.exists() else place.parent).free if place.parent.exists() else 0
        return CapacityError(
            f"the disk of {place} is full ({format_bytes(free)} free); nothing in the cache was changed",
            remedies=_remedies(),
        )
    return ConfigError(f"cannot write to {place}: {error.strerror or error}", remedies=_remedies())


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A file beside `path` to write to, which takes its place when the block ends: who reads `path` sees what was
    there before or all that is new. Raises OSError."""
    part = path.with_name(f".headrace.{os.getpid()}-{threading.get_ident()}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def lock(path: Path, report: Report) -> Iterator[None]:
    """Hold a lock between processes; it goes when the process ends, however it ends."""
    import fcntl

    try:
        file = open(path, "a")
    except OSError as error:
        raise disk_error(error, path.parent) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"another process holds {path}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remedies() -> list[str]:
    return ["free some space", "HEADRACE_CACHE=FOLDER and HF_HOME=FOLDER on another disk"]
