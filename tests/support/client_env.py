"""Programs that use the server through a library which lives in an environment of its own (ci/clients makes them)."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("HEADRACE_CLIENTS", ROOT / ".ci-venv-clients"))
SCRIPTS = ROOT / "tests" / "clients" / "scripts"


def run_client(name: str, script: str, *arguments: str, timeout_s: float = 300) -> str:
    """What a script of tests/clients/scripts prints, run with the environment `name`. Skips if that is not there,
    fails if the script does."""
    with start_client(name, script, *arguments) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    assert process.returncode == 0, f"{script} failed:\n{output[-12000:]}"
    return output


def start_client(name: str, script: str, *arguments: str) -> "subprocess.Popen[str]":
    """The same, running; stdout and stderr come as one."""
    if script.endswith(".mjs"):
        node, modules = shutil.which("node"), FOLDER / name / "node_modules"
        if node is None or not modules.is_dir():
            pytest.skip(f"no node, or no {modules}: ci/clients {name} makes it")
        # Modules are looked up from the script's place, so it has to stand beside them.
        copy = shutil.copyfile(SCRIPTS / script, FOLDER / name / script)
        command = [node, str(copy), *arguments]
    else:
        python = FOLDER / name / "bin" / "python"
        if not python.exists():
            pytest.skip(f"no {python}: ci/clients {name} makes it")
        command = [str(python), str(SCRIPTS / script), *arguments]
    # The client must find its own packages, not the checkout's.
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
