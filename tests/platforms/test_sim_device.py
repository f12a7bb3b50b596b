"""The strict simulated device, in a process of its own: torch's private-use device gets a name once in a process."""

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

CHECKS = (
    "ops.rope.float16",
    "ops.scale.bfloat16",
    "ops.apply_penalties",
    "ops.add_logit_bias",
    "ops.sample",
    "ops.linear.float32",
    "attention.window_softcap.float32",
    "attention.sinks.bfloat16",
    "attention.alibi.float32",
    "model.seeds",
)
PROGRAM = """
import dataclasses, json
import torch

torch.set_num_threads(1)
from headrace.core.config import DeviceConfig, EngineConfig
from headrace.core.devices import open_device
from headrace.core.plugin_loader import load_plugins
from headrace.core.self_test import Driver, load_runner, tiny_config, tiny_spec
from headrace.platforms.conformance.kit import all_checks, run_check
from headrace.platforms.conformance.registry import Subject

plugins = load_plugins()
device, reference = (
    open_device(EngineConfig(device=DeviceConfig(device=name, threads=1)), plugins) for name in ("sim", "reference")
)
from headrace.platforms.sim.tensor import COUNTS

found = {}
config = tiny_config(tiny_spec(window=24))
drivers = [Driver(load_runner(opened, config), config) for opened in (device, reference)]
for driver in drivers:
    driver.add([5, 6, 7]), driver.add(list(range(40)), temperature=0.8, seed=3)
steps = {"prefill": {0: 3, 1: 40}, "decode": {0: 1, 1: 1}, "logprobs": {0: 1, 1: 1}}
for name, counts in steps.items():
    num_logprobs = 4 if name == "logprobs" else -1
    COUNTS.reset()
    got = drivers[0].step(counts, num_logprobs=num_logprobs)
    found[name] = dataclasses.asdict(COUNTS)
    want = drivers[1].step(counts, num_logprobs=num_logprobs)
    found[name]["equal"] = bool((got.token_ids == want.token_ids).all())

x = torch.arange(6, device="sim", dtype=torch.float32)
COUNTS.reset()
x.sum().item(), float(x[0]), bool(x[1] > 0), (x > 2).nonzero()
found["syncs"] = COUNTS.host_syncs
try:
    x + torch.ones(6)
except RuntimeError as error:
    found["mixed"] = f"{type(error).__name__}: {error}"
found["auto"] = open_device(EngineConfig(device=DeviceConfig(device="auto")), plugins).info.id
subject = Subject(device, plugins)
results = [run_check(all_checks()[name], subject) for name in CHECKS]
found["checks"] = {result.name: [result.outcome, result.detail] for result in results}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    from headrace.platforms.sim.detect import detect

    if detect().status != "ok":
        pytest.skip(detect().reason)
    run = subprocess.run(
        [sys.executable, "-c", f"CHECKS = {CHECKS!r}\n{PROGRAM}"], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")


@pytest.mark.parametrize("step", ["prefill", "decode", "logprobs"])
def test_a_step_is_one_copy_in_and_one_out_without_a_hidden_wait(found: dict[str, Any], step: str) -> None:
    counted = found[step]
    assert (counted["copies_in"], counted["copies_out"], counted["host_syncs"]) == (1, 1, 0)
    assert counted["equal"]


def test_reads_of_values_are_counted(found: dict[str, Any]) -> None:
    assert found["syncs"] == 4


def test_mixing_devices_is_an_error(found: dict[str, Any]) -> None:
    assert found["mixed"].startswith("MixedDevices: aten.add.Tensor: one tensor is on sim, another (6,) on cpu")


def test_auto_never_takes_it(found: dict[str, Any]) -> None:
    assert found["auto"] == "cpu"


def test_it_conforms_in_a_sample(found: dict[str, Any]) -> None:
    assert list(found["checks"]) == list(CHECKS)
    assert {name: check for name, check in found["checks"].items() if check[0] != "passed"} == {}


@pytest.mark.slow
def test_it_conforms() -> None:
    command = [
        sys.executable,
        "-c",
        "from headrace.core.cli import main; main()",
        "conformance",
        "--device",
        "sim",
        "--json",
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert run.returncode == 0, run.stdout + run.stderr
