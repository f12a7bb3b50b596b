"""Files of results: whole or not there, whatever stops the writing."""

import os
import resource
from pathlib import Path

import pytest

from headrace.core.cli.output import output_file, saved
from headrace.core.errors import CapacityError, ConfigError


def test_half_a_file_replaces_nothing(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text("before")
    file.chmod(0o640)
    link = tmp_path / "link.json"
    link.symlink_to("x.json")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        for name in ("x.json", "new.json"):
            with pytest.raises(ConfigError, match=f"cannot write .*{name}: File too large"):
                with saved({"a": "b" * 5000}, str(tmp_path / name)):
                    pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(KeyboardInterrupt), output_file(file) as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert file.read_text() == "before" and sorted(os.listdir(tmp_path)) == ["link.json", "x.json"]
    with saved({"a": 1}, str(link)):
        pass
    assert file.read_text() == '{\n  "a": 1\n}\n' and link.is_symlink() and file.stat().st_mode & 0o777 == 0o640


def test_a_full_disk_comes_after_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CapacityError, match="no space left to write /dev/full"):
        with saved({"a": 1}, "/dev/full"):
            print("shown")
    assert capsys.readouterr().out == "shown\n"


def test_what_is_no_plain_file_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with saved({"a": 1}, str(pipe)):
        pass
    assert b'"a": 1' in os.read(reader, 1000)
    os.close(reader)
