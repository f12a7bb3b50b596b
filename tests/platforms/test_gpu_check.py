"""ci/gpu_check on the emulated device: the script that is run on a borrowed GPU works before there is one."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

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
