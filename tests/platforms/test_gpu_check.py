"""ci/gpu_check on the emulated device: the script that is run on a borrowed GPU works before there is one."""

import json
import subprocess
import sys
import tomllib
from importlib.machinery import SourceFileLoader
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec, module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "ci" / "gpu_check"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: pip install 'headrace[cuda]'")
def test_the_gpu_check_runs_dry(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    run = subprocess.run(
        [sys.executable, SCRIPT, "--dry", "--out", out], capture_output=True, text=True, timeout=1500
    )
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(out.read_text())
    assert {name: part["outcome"] for name, part in report.items()} == dict.fromkeys(report, "ok")
    assert list(report) == [
        "about",
        "graph_equals_eager",
        "end_to_end tiny",
        "throughput tiny",
        "conformance",
    ]
    assert report["end_to_end tiny"]["equal"] == 4
    assert report["graph_equals_eager"]["recorded"] > 0
    assert report["throughput tiny"]["headrace_tokens_per_s"] > 0


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # the script sets them
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    spec = spec_from_loader("gpu_check", SourceFileLoader("gpu_check", str(SCRIPT)))
    assert spec is not None and spec.loader is not None
    script = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", script)
    spec.loader.exec_module(script)
    return script


def test_the_kit_ends_when_its_time_is_over(script: Any) -> None:
    scale = script.Scale("norm", {}, 0, 0, 0, 0)
    whole = script.conformance("reference", scale, 600.0)
    assert whole["passed"] > 2 and whole["left_out"] == 0
    assert script.conformance("reference", scale, -1.0) == {"passed": 1, "left_out": sum(whole.values()) - 1}


def test_a_checkout_that_is_not_installed_has_its_entry_points(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(script, "version", absent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    script.see_checkout()
    program = "import importlib.metadata as m; print(*(p.value for p in m.entry_points(group='headrace.plugins')))"
    run = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True)
    project = tomllib.loads((SCRIPT.parents[1] / "pyproject.toml").read_text())["project"]
    assert sorted(run.stdout.split()) == sorted(project["entry-points"]["headrace.plugins"].values())
