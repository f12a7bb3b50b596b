"""docs/add-a-model.md is run: its family is found as a file and nothing else is edited."""

import re
from pathlib import Path
from typing import Any

import pytest

from headrace.core.models import families
from headrace.core.models.registry import family_names, find_family

PAGE = Path(__file__).parents[3] / "docs" / "add-a-model.md"


def python_blocks() -> list[str]:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    return blocks


def test_the_python_of_the_page_runs() -> None:
    names: dict[str, Any] = {}
    for block in python_blocks():
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["WEIGHTS"].entries


def test_its_file_is_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tutor.py").write_text(python_blocks()[0], encoding="utf-8")
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    assert "tutor" in family_names()
    assert find_family("tutor").name == "tutor"


def test_files_that_the_page_names_exist() -> None:
    for name in re.findall(r"`((?:core|tests)/[\w/]+\.py)`", PAGE.read_text(encoding="utf-8")):
        assert (PAGE.parents[1] / name).is_file(), name
