"""The kit in a Python without torch, as `ci/install` makes it: no check fails for want of it."""

import json
import os
import subprocess
import sys
from pathlib import Path


def test_the_kit_without_torch(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    program = "from headrace.core.cli import main; main()"
    command = [sys.executable, "-c", program, "conformance", "--device", "cpu", "--json"]
    done = subprocess.run(
        [*command, "--select", "model."],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path},
    )
    checks = json.loads(done.stdout)["checks"]
    assert [check for check in checks if check["outcome"] == "failed"] == []
    assert done.returncode == 0 and any(check["outcome"] == "passed" for check in checks)
    unsupported = [check["detail"] for check in checks if check["outcome"] == "unsupported"]
    assert any("pip install 'headrace[torch]'" in detail for detail in unsupported)
