"""`headrace complete` prints on every emulated device the greedy text that it prints on the cpu, in float32."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tiny_server_model import tiny_server_model

MAIN = "import sys; from headrace.core.cli import main; main()"
DEVICES = {
    "reference": "torch",
    "sim": "torch",
    "gaudi:emulated": "torch",
    "tpu:emulated": "jax",
    "neuron:emulated": "jax",
    "cuda:emulated": "triton",
    "rocm:emulated": "triton",
    "xpu:emulated": "triton",
}
"""By device, the package that it needs."""


def complete(model: Path, device: str) -> str:
    """What the command prints; one process a device, as users start it."""
    options = ["--device", device, "--dtype", "float32", "--load-format", "dummy", "--max-tokens", "12"]
    options += [
        "--temperature",
        "0",
        "--max-model-len",
        "64",
        "--max-num-seqs",
        "2",
        "--max-num-batched-tokens",
        "32",
    ]
    environment = os.environ | {"HEADRACE_KV_MEMORY": "2MiB", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", MAIN, "complete", str(model), "Once upon a time", "--raw", *options]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_server_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path) -> str:
    text = complete(model, "cpu")
    assert len(text.strip()) > 4
    return text


@pytest.mark.parametrize(
    "device",
    [device if device == "gaudi:emulated" else pytest.param(device, marks=pytest.mark.slow) for device in DEVICES],
)
def test_the_text_is_that_of_the_cpu(device: str, model: Path, expected: str) -> None:
    package = DEVICES[device]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    assert complete(model, device) == expected
