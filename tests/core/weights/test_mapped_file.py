"""A mapping gives its pages back while a file is read through, and its views stay right."""

import os
import re
import resource
from pathlib import Path

import numpy as np
import pytest

from headrace.core.errors import CapacityError, WeightError
from headrace.core.weights import mapped_file
from headrace.core.weights.mapped_file import MappedFile

MIB = 2**20


def file_pages() -> int:
    """Bytes of files that count as this process's memory, as the kernel says."""
    found = re.search(r"RssFile:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def test_reading_a_file_through_keeps_little_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_file, "_RESIDENT_BYTES", 4 * MIB)
    path = tmp_path / "big"
    content = np.arange(64 * MIB // 4, dtype=np.uint32)
    content.tofile(path)
    file = MappedFile(path)
    first = file.view(0, MIB)
    before, peak = file_pages(), 0
    for begin in range(0, 64 * MIB, MIB):
        part = file.view(begin, MIB).view(np.uint32)
        assert part.sum(dtype=np.uint64) == content[begin // 4 : (begin + MIB) // 4].sum(dtype=np.uint64)
        peak = max(peak, file_pages())
    assert peak - before < 16 * MIB
    np.testing.assert_array_equal(first.view(np.uint32), content[: MIB // 4])
    file.close()


def test_closing_unmaps_what_nobody_uses(tmp_path: Path) -> None:
    path = tmp_path / "some"
    path.write_bytes(b"x" * 4096)
    file = MappedFile(path)
    view = file.view(0, 10)
    file.close()
    assert str(path) in Path("/proc/self/maps").read_text() and view.tobytes() == b"x" * 10
    del view
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_a_file_that_shrinks_is_told(tmp_path: Path) -> None:
    """A download that starts again would else end the process with a bus error."""
    path = tmp_path / "some"
    path.write_bytes(b"x" * 65536)
    file = MappedFile(path)
    os.truncate(path, 4096)
    assert file.view(0, 4096).tobytes() == b"x" * 4096
    with pytest.raises(WeightError, match="some: became shorter while it was read, and has 4096 bytes now"):
        file.view(4096, 10)
    path.unlink()  # what is gone by name is still there to be read
    assert file.view(0, 10).tobytes() == b"x" * 10
    file.close()


def test_a_file_larger_than_what_may_be_mapped(tmp_path: Path) -> None:
    """Batch systems limit the addresses of a process."""
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.truncate(2**40)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**39, limits[1]))
    try:
        with pytest.raises(CapacityError, match=r"large.safetensors: 1.0 TiB cannot be mapped") as error:
            MappedFile(path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert "ulimit -v unlimited" in error.value.remedies
