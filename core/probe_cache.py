"""Remembers on disk which third-party plugins could be imported, so that only a changed one is tried again."""

import hashlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from importlib.metadata import Distribution
from importlib.util import find_spec
from pathlib import Path

from .cache import cache_folder, new_file
from .platform import API, Status
from .probe_process import Outcome

TIMEOUT_VERDICT_S = 3600.0
"""Seconds that a time-out is believed: the machine may just have been busy."""

_log = logging.getLogger(__name__)


def fingerprint(distribution: Distribution, target: str) -> str:
    """A digest that changes when the plugin, what it may import, this interpreter or our interface does.

    A normal installation is known by its RECORD, which lists a hash of each file; an editable one, or one
    without RECORD, by the times and sizes of its modules. Installing or removing any package changes the time
    of the site directory, which gives a plugin that missed a package another chance.
    """
    module = target.partition(":")[0]
    record = distribution.read_text("RECORD") or ""
    parts: list[object] = [distribution.version, target, sys.version, API, record]
    parts += [(path, _mtime_ns(path)) for path in sys.path if path.endswith("-packages")]
    if not re.search(rf"^{re.escape(module.replace('.', '/'))}(/__init__)?\.py,", record, re.MULTILINE):
        parts += _module_files(module.partition(".")[0])
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def read_verdict(distribution: str, plugin: str, key: str) -> Outcome | None:
    """The remembered verdict, or None if there is none for exactly this fingerprint."""
    try:
        entry = json.loads(_file(distribution, plugin).read_text())
        if entry["key"] != key:
            return None
        outcome = Outcome(status=Status(entry["status"]), reason=str(entry["reason"]))
        fresh = time.time() - float(entry["time_s"]) < TIMEOUT_VERDICT_S
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return outcome if fresh or outcome.status != Status.TIMEOUT else None


def write_verdict(distribution: str, plugin: str, key: str, outcome: Outcome) -> None:
    """Remember a verdict. A directory that cannot be written costs a new check each time, nothing else."""
    file = _file(distribution, plugin)
    entry = {"key": key, "status": str(outcome.status), "reason": outcome.reason, "time_s": time.time()}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with new_file(file) as part:
            part.write_text(json.dumps(entry))
    except OSError as error:
        _log.debug("plugin verdict not kept file=%s error=%s", file, error)


def _file(distribution: str, plugin: str) -> Path:
    # One file for each plugin and environment: a new verdict replaces the old one.
    environment = hashlib.sha256(f"{sys.prefix}\0{distribution}\0{plugin}".encode()).hexdigest()[:12]
    name = re.sub(r"[^A-Za-z0-9_-]", "_", f"{distribution}-{plugin}")[:80]
    return cache_folder() / "plugins" / f"{name}-{environment}.json"


def _module_files(package: str) -> Iterator[tuple[str, int, int]]:
    """Path, time and size of a top-level package's or module's files, without importing it."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return
    if spec is None:
        return
    roots = list(spec.submodule_search_locations or ())
    files = [Path(spec.origin)] if spec.origin and not roots else []
    for root in roots:
        files += (path for path in Path(root).rglob("*") if path.suffix in (".py", ".so"))
    for path in sorted(files):
        try:
            status = path.stat()
        except OSError:
            continue
        yield str(path), status.st_mtime_ns, status.st_size


def _mtime_ns(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0
