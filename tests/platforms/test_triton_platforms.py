"""GPU platforms without a GPU: honest detection from fake system files, and the kernels' own path when emulated."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import DeviceUnavailable
from headrace.core.platform import Status
from headrace.platforms.cuda.detect import probe_driver
from headrace.platforms.cuda.device import CudaPlatform
from headrace.platforms.gpu.torch_build import TorchBuild, installed_torch, software_gap
from headrace.platforms.rocm import detect as rocm
from headrace.platforms.xpu import detect as xpu
from tiny_checkpoints import save_tiny

PROGRAM = """
import json
import torch

torch.set_num_threads(1)
from headrace.core.config import DeviceConfig, EngineConfig
from headrace.core.devices import open_device
from headrace.core.self_test import Driver, load_runner, tiny_config, tiny_spec

config = tiny_config(tiny_spec(window=24))
found = {}
for name in ("reference", DEVICE):
    device = open_device(EngineConfig(device=DeviceConfig(device=name, threads=1)))
    runner = load_runner(device, config)
    driver = Driver(runner, config)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    driver.add(prompt), driver.add(prompt[:3], temperature=0.8, seed=5)
    if name == DEVICE:
        from headrace.kernels.triton.ops import LAUNCHES
        LAUNCHES.clear()
    driver.step({0: 8, 1: 3})
    if name == DEVICE:
        found["launches"] = dict(LAUNCHES)
    driver.step({0: 1, 1: 1})
    found[name] = [request.token_ids for request in driver.requests]
found["about"] = dict(device.describe())
print(json.dumps(found))
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: pip install 'headrace[cuda]'")
@pytest.mark.parametrize(("name", "tuning"), [("cuda", "sm_90"), ("rocm", "gfx942"), ("xpu", "xe")])
def test_an_emulated_gpu_launches_its_kernels(name: str, tuning: str) -> None:
    program = f"DEVICE = {name + ':emulated'!r}\n{PROGRAM}"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=environment
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found[f"{name}:emulated"] == found["reference"]
    assert found["about"] == {"arch": tuning, "tuning": tuning, "kernels": "Triton, interpreted"}
    layers = 2
    assert found["launches"] == {
        "embedding": 1,
        "rms_norm": 1,
        "add_rms_norm": 2 * layers,
        "rope": 2 * layers,
        "write_kv": layers,
        "paged_attention": layers,
        "act_mul": layers,
        "gather": found["launches"]["gather"],
        "sample": 1,
        "sample.best": 1,
    }


QUANTIZED = """
import json
import torch

torch.set_num_threads(1)
from headrace import LLM, SamplingParams
from headrace.kernels.triton.ops import LAUNCHES

options = dict(dtype="float32", skip_tokenizer_init=True, threads=1, max_model_len=64, kv_memory="8MiB")
prompts = [{"prompt_token_ids": [3 + 7 * i % 90 for i in range(length)]} for length in (1, 20, 5)]
found = {}
for quantize, kv_dtype in SCHEMES:
    for device in ("reference", "cuda:emulated"):
        with LLM(MODEL, device=device, quantize=quantize, kv_dtype=kv_dtype, **options) as llm:
            outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
            found[quantize, device] = [output.outputs[0].token_ids for output in outputs]
    assert found[quantize, device] == found[quantize, "reference"], found
    assert (quantize or "int8") == "int8" or found[quantize, device] != found[None, device], "it changed nothing"
    assert (LAUNCHES["linear"] > 0) == (quantize is not None)
    LAUNCHES.clear()
print(json.dumps(len(found)))
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: pip install 'headrace[cuda]'")
def test_quantized_weights_give_the_tokens_of_the_definitions(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", hidden_size=128, intermediate_size=256, num_hidden_layers=2, head_dim=32)
    # Those that leave activations as they are, on the reference too.
    schemes = ((None, "auto"), ("int4-g64", "auto"), ("int4-g128", "auto"), ("int4-sym", "auto"), ("int8", "int8"))
    program = f"MODEL = {str(tmp_path)!r}\nSCHEMES = {schemes}\n{QUANTIZED}"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == 2 * len(schemes)


def test_what_torch_was_built_for_is_read_from_its_files(tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text(
        "from typing import Optional\n__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n"
        "hip: Optional[str] = '7.1'\n"
    )
    build = installed_torch(tmp_path)
    assert build == TorchBuild(version="2.13.0+cpu", hip="7.1")
    gap = software_gap(build, "cuda", fix="fix")
    assert gap is not None
    assert (gap.status, gap.reason) == (Status.MISSING, "the installed torch 2.13.0+cpu is not built for it (cuda)")
    missing = software_gap(None, "cuda", fix="fix")
    assert missing is not None and "torch is not installed" in missing.reason


def test_what_triton_compiles_with_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images that run models seldom have a compiler; without this, the first request would find out."""
    build = TorchBuild(version="2.13.0", cuda="13.0")
    monkeypatch.setattr("headrace.platforms.gpu.torch_build.find_spec", lambda name: name)
    compiler = tmp_path / "gcc"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    gap = software_gap(build, "cuda", fix="fix")
    assert gap is not None and "no C compiler" in gap.reason and gap.fix == "apt install gcc"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    gap = software_gap(build, "cuda", fix="fix")
    assert gap is not None and str(tmp_path / "Python.h") in gap.reason and gap.fix == "apt install python3-dev"
    (tmp_path / "Python.h").touch()
    assert software_gap(build, "cuda", fix="fix") is None
    monkeypatch.setenv("CC", str(tmp_path / "icx"))
    gap = software_gap(build, "cuda", fix="fix")
    assert gap is not None and "what CC names" in gap.reason


class FakeDriver:
    """A driver's library whose start fails with a code."""

    def __init__(self, code: int) -> None:
        self._code = code

    def cuInit(self, flags: int) -> int:
        return self._code


@pytest.mark.parametrize(("code", "words"), [(100, "sees no GPU"), (803, "does not fit"), (3, "does not start")])
def test_a_driver_that_does_not_start_says_why(code: int, words: str) -> None:
    probe = probe_driver(FakeDriver(code))  # type: ignore[arg-type]
    assert probe.status == Status.NO_DEVICE
    assert words in probe.reason and f"cuInit gave {code}" in probe.reason


class OldDriver(FakeDriver):
    """A driver of GPUs of some compute capabilities."""

    def __init__(self, *capabilities: tuple[int, int]) -> None:
        super().__init__(0)
        self._capabilities = capabilities

    def cuDeviceGetCount(self, count: Any) -> None:
        count._obj.value = len(self._capabilities)

    def cuDeviceGet(self, handle: Any, index: int) -> None:
        handle._obj.value = index

    def cuDeviceGetName(self, name: Any, size: int, handle: Any) -> None:
        name.value = b"Tesla T4"

    def cuDeviceTotalMem_v2(self, total: Any, handle: Any) -> None:
        total._obj.value = 16 << 30

    def cuDeviceGetAttribute(self, number: Any, attribute: int, handle: Any) -> None:
        number._obj.value = self._capabilities[handle.value][attribute - 75]


def test_gpus_that_triton_does_not_serve_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles for Turing without its matrix units, and fails for integers."""
    old: Any = OldDriver((7, 5))
    probe = probe_driver(old)
    assert probe.status == Status.NO_DEVICE and probe.devices[0].arch == "sm_75"
    assert probe.reason == "Tesla T4 is sm_75, and Triton's kernels are for sm_80 (Ampere) and newer"
    both: Any = OldDriver((7, 5), (8, 6))
    assert probe_driver(both).status == Status.OK
    capabilities = [(7, 5), (12, 0)]
    monkeypatch.setattr("torch.cuda.get_device_capability", capabilities.__getitem__)
    with pytest.raises(DeviceUnavailable, match="cuda:0 is sm_75, and Triton's kernels are for sm_80"):
        CudaPlatform().architecture(0)
    assert CudaPlatform().architecture(1) == "sm_120"


def test_amd_gpus_are_read_from_the_topology(tmp_path: Path) -> None:
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for index, (simds, version) in enumerate([(0, 0), (1216, 90402), (192, 110000), (440, 90010)]):
        folder = nodes / str(index)
        (folder / "mem_banks/0").mkdir(parents=True)
        (folder / "properties").write_text(f"simd_count {simds}\ngfx_target_version {version}\n")
        (folder / "mem_banks/0/properties").write_text("heap_type 1\nsize_in_bytes 4096\n")
    found = rocm.topology(tmp_path)
    assert [(info.id, info.arch, info.total_bytes) for info in found] == [
        ("rocm:0", "gfx942", 4096),
        ("rocm:1", "gfx1100", 4096),
        ("rocm:2", "gfx90a", 4096),
    ]
    assert "may not open" in rocm.detect(tmp_path).reason
    assert rocm.detect(tmp_path / "none").reason == "the driver (kfd) knows no GPU"


def test_intel_gpus_are_told_from_others(tmp_path: Path) -> None:
    for name, vendor in (("renderD128", "0x10de"), ("renderD129", "0x8086")):
        folder = tmp_path / "sys/class/drm" / name / "device"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "device").write_text("0x56a0\n")
    assert xpu.render_nodes(tmp_path) == [(tmp_path / "dev/dri/renderD129", "0x56a0")]
    assert "may not open" in xpu.detect(tmp_path).reason
    assert "Intel's" in xpu.detect(tmp_path / "none").reason
