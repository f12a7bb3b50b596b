"""ci/aot-gpu: what it compiles is what the ops launch, all of it, and a GPU that is not here has code for it."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "ci" / "aot-gpu"

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed: pip install 'headrace[cuda]'"
)


def compiled(*arguments: str) -> tuple[str, str]:
    """(rows, what it says in the end). Triton compiles here, as nothing tells it to interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    return run.stdout, run.stderr


def test_every_kernel_is_launched_by_some_op_on_every_gpu() -> None:
    assert compiled("--only=none has this name") == ("", "0 compiled, 0 bad\n")


def test_a_kernel_is_compiled_for_each_vendor() -> None:
    rows, _ = compiled("--only=gather", "sm_90", "gfx942")
    cuda, rocm = (row.split(" | ") for row in rows.splitlines())
    assert cuda[:3] == ["| sm_90", "gather", "bf16"] and rocm[:3] == ["| gfx942", "gather", "bf16"]
    assert all(0 < int(registers) < 256 for registers in (cuda[4], rocm[4]))


def test_tiles_of_float32_do_not_spill() -> None:
    """Products of float32 are sums in registers: a tile as large as bfloat16's spilled six kilobytes a thread."""
    rows, _ = compiled("--only=linear many int8 by 32 float32", "sm_90")
    assert rows.split(" | ")[6] == "0 |\n"
