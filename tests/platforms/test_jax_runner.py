"""The JAX runner under the whole engine: tokens, compiles, memory, several devices, and what it refuses."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace.core.config import DeviceConfig, EngineConfig
from headrace.core.devices import find_platforms, open_device
from headrace.core.errors import DeviceUnavailable, Unsupported
from headrace.core.models.declare import declare_params
from headrace.core.platform import Device, Status
from headrace.core.plugin_loader import load_plugins
from headrace.core.self_test import Driver, load_runner, tiny_config, tiny_spec

pytest.importorskip("jax", reason="jax is not installed: pip install 'headrace[tpu]'")
import jax

from headrace.core.ops.jax import FUNCTIONS
from headrace.core.runner.jax import JaxRunner, host_devices
from headrace.platforms.conformance.kit import all_checks, run_check
from headrace.platforms.conformance.registry import Subject
from headrace.platforms.jax.emulated import emulated_info
from headrace.platforms.neuron.device import NeuronDevice
from headrace.platforms.tpu.device import TpuChips

CHECKS = (
    "attention.window_softcap.bfloat16",
    "attention.sinks.float32",
    "attention.alibi.float32",
    "attention.int8_cache.bfloat16",
    "attention.int8_cache_decode.float32",
    "model.chunked",
    "model.batch",
    "model.seeds",
    "model.run_ahead",
    "memory.kv_plan",
    "memory.out_of_memory",
    "runner.close",
)


def open_on(name: str) -> Device:
    return open_device(EngineConfig(device=DeviceConfig(device=name, threads=1)))


@contextmanager
def _compiles() -> Iterator[list[str]]:
    """What JAX says of compiling meanwhile."""
    heard: list[str] = []

    def listen(event: str, duration_s: float, **details: Any) -> None:
        if "compile" in event:
            heard.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield heard
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject(open_on("neuron:emulated"), load_plugins())


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: str, subject: Subject) -> None:
    result = run_check(all_checks()[check], subject)
    assert result.outcome == "passed", result.detail


def test_no_compile_after_warmup() -> None:
    device = open_on("neuron:emulated")
    config = tiny_config(tiny_spec())
    runner = load_runner(device, config)
    assert isinstance(runner, JaxRunner)
    driver = Driver(runner, config)
    with _compiles() as compiled:
        rng = np.random.default_rng(0)
        for length in (1, 7, 33, 129, 300):
            driver.remove_all()
            driver.generate(rng.integers(0, 211, length).tolist(), 3)
        driver.remove_all()
        rows = [driver.add([3, 4, 5], temperature=1.0, seed=seed) for seed in range(3)]
        driver.step({row: 3 for row in rows})
        driver.step({row: 1 for row in rows}, num_logprobs=5)
        assert compiled == []
        jax.jit(lambda x: x * 3 + 1)(np.ones(3))
        assert compiled, "the listener hears of compiles"
    again = load_runner(device, config)
    assert isinstance(again, JaxRunner)
    num_before = runner.num_programs
    Driver(again, config)
    assert num_before is not None and again.num_programs == num_before > 0


def test_a_cache_of_integers_gives_the_references_tokens_in_less_memory() -> None:
    tokens, sizes = [], []
    for name, kv_dtype in (("reference", "int8"), ("neuron:emulated", "int8"), ("neuron:emulated", "")):
        device, config = open_on(name), dataclasses.replace(tiny_config(tiny_spec()), kv_dtype=kv_dtype)
        runner = load_runner(device, config)
        driver = Driver(runner, config)
        tokens.append(driver.generate([3, 1, 4, 1, 5, 9, 2, 6], 6))
        sizes.append(sum(runner.kv_plan().block_bytes))
    assert tokens[0] == tokens[1]
    assert sizes[0] == sizes[1] < sizes[2] / 2


TENSOR_PARALLEL = """
import collections, json, re
from headrace.core.platform import Caps, DeviceInfo
from headrace.core.runner.jax import host_devices
from headrace.core.self_test import Driver, load_runner, tiny_config, tiny_spec
from headrace.platforms.neuron.device import EmulatedNeuron
from headrace.platforms.jax.emulated import emulated_info

tokens, found = [], {}
for count in (1, 2):
    device = EmulatedNeuron(info=emulated_info("neuron"), devices=host_devices()[:count], shared_memory=True)
    config = tiny_config(tiny_spec(window=24))
    runner = load_runner(device, config)
    driver = Driver(runner, config)
    tokens.append([driver.generate([(7 * i + 3) % 211 for i in range(n)], 8) for n in (5, 40)])
[programs] = device.programs.values()
text = programs.program(programs.buckets.all_forward()[0]).as_text()
kinds = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all"
found = collections.Counter(re.findall(rf"= \\S+ ({kinds})(?:-start)?\\(", text))
print(json.dumps([tokens, found]))
"""


@pytest.mark.slow
def test_two_devices_give_the_tokens_of_one() -> None:
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    run = subprocess.run(
        [sys.executable, "-c", TENSOR_PARALLEL], env=environment, capture_output=True, text=True, timeout=500
    )
    assert run.returncode == 0, run.stderr[-2000:]
    (alone, together), collectives = json.loads(run.stdout.splitlines()[-1])
    assert together == alone
    assert collectives == {"all-reduce": 4}, "two for each of two layers; nothing else moves"


def test_cores_that_do_not_say_how_much_memory_they_have_are_taken_for_small_ones() -> None:
    """JAX on a processor gives no memory_stats(), as some releases of Neuron's plugin give none."""
    core, other = (
        kind(info=emulated_info("neuron"), devices=host_devices()[:1]) for kind in (NeuronDevice, TpuChips)
    )
    assert core.mesh.devices.flat[0].memory_stats() is None
    before = core.memory()
    kept = jax.numpy.ones(1 << 20, np.float32)
    after = core.memory()
    assert after.total_bytes == before.total_bytes == 12 << 30
    assert after.used_bytes - before.used_bytes == kept.nbytes
    assert after.free_bytes == after.total_bytes - after.used_bytes
    with pytest.raises(Unsupported, match="does not say how much memory it has"):
        other.memory()


@pytest.mark.parametrize("name", ["neuron:emulated", "tpu:emulated"])
def test_an_emulation_runs_large_models_op_by_op(caplog: pytest.LogCaptureFixture, name: str) -> None:
    """An op is compiled once, however many layers it is of."""
    caplog.set_level("INFO")
    jax.clear_caches()
    counts, devices = [], [open_on(name), open_on("reference")]
    for num_layers in (9, 12):
        config = tiny_config(tiny_spec(num_layers=num_layers))
        runner, definition = (load_runner(device, config) for device in devices)
        driver = Driver(runner, config)
        with _compiles() as compiled:
            tokens = driver.generate([3, 5, 7], 4)
        counts.append(len(compiled))
        assert tokens == Driver(definition, config).generate([3, 5, 7], 4)
        assert isinstance(runner, JaxRunner) and runner.num_programs is None
        assert f"steps run op by op, each is compiled when it first runs ({num_layers} layers)" in caplog.text
    assert counts[1] == 0 < counts[0], "layers of the same shapes bring nothing new"


EXPERTS_AND_LATENTS = """
import json, sys, tempfile
from pathlib import Path
import torch
from headrace import LLM, SamplingParams
from headrace.core.runner.jax import host_devices
from headrace.platforms.jax.emulated import emulated_info
from headrace.platforms.neuron import device
from tiny_checkpoints import greedy_tokens, save_golden_case

torch.set_num_threads(1)

class Both(device.NeuronPlatform):
    def open(self, ids, config):
        return device.EmulatedNeuron(info=emulated_info("neuron"), devices=host_devices(), shared_memory=True)

device.NeuronPlatform = Both
prompts = [[3, 1, 4, 1, 5], [(7 * i + 3) % 200 + 3 for i in range(20)]]
params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
options = dict(dtype="float32", skip_tokenizer_init=True, threads=1, max_num_seqs=2, max_num_batched_tokens=32)
with tempfile.TemporaryDirectory() as folder:
    model = save_golden_case(Path(folder), sys.argv[1])
    with LLM(folder, device="neuron:emulated", max_model_len=64, kv_memory="2MiB", **options) as llm:
        assert llm.built.device.describe()["cores"] == "2"
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    want = [greedy_tokens(model, prompt, 6) for prompt in prompts]
print(json.dumps([[output.outputs[0].token_ids for output in outputs], want]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("case", ["deepseek_v3", "gpt_oss"])
def test_experts_and_latent_attention_over_two_devices_give_the_tokens_of_transformers(case: str) -> None:
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    run = subprocess.run(
        [sys.executable, "-c", EXPERTS_AND_LATENTS, case],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    got, want = json.loads(run.stdout.splitlines()[-1])
    assert got == want


def test_sampling_on_neuron_needs_no_sort() -> None:
    """Its compiler for trn2 refuses one."""
    from headrace.platforms.neuron.ops import sample

    rows, limits = jax.ShapeDtypeStruct((4,), "int32"), jax.ShapeDtypeStruct((4,), "float32")
    shapes = (jax.ShapeDtypeStruct((4, 211), "float32"), rows, rows, limits, rows, limits, limits)
    assert "sort" in jax.jit(FUNCTIONS["sample"]).lower(*shapes).as_text()
    assert "sort" not in jax.jit(sample).lower(*shapes).as_text()


def test_uneven_heads_are_refused() -> None:
    from headrace.core.runner.jax_sharding import check_divides

    check_divides(tiny_spec(), 2)
    with pytest.raises(Unsupported, match="2 KV heads cannot be cut over 4 devices"):
        check_divides(tiny_spec(), 4)


def test_an_op_without_a_body_is_named_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {name: function for name, function in FUNCTIONS.items() if name != "rope"}
    monkeypatch.setattr("headrace.core.runner.jax.FUNCTIONS", functions)
    with pytest.raises(Unsupported, match="no body of the op rope in JAX"):
        open_on("neuron:emulated").runner(tiny_config(tiny_spec()))


@pytest.mark.parametrize("name", ["tpu", "neuron"])
def test_a_device_that_is_not_here_says_so(name: str) -> None:
    plugins = load_plugins()
    found = {item.spec.name: item for item in find_platforms(plugins)}
    assert found[name].probe.status == Status.NO_DEVICE
    assert "no device file /dev/" in found[name].probe.reason
    assert f"{name}:emulated" in found[name].probe.fix
    with pytest.raises(DeviceUnavailable, match="no device file"):
        open_on(name)


def test_devices_are_counted_on_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the second host of two, JAX's own ids begin at 4, and hardware ids may be those of chips or -1."""
    from headrace.platforms.jax.device import JaxPlatform

    local = [
        SimpleNamespace(
            id=4 + i, local_hardware_id=-1, device_kind="TPU v5e", memory_stats=lambda: {"bytes_limit": 7}
        )
        for i in range(4)
    ]
    monkeypatch.setattr(jax, "local_devices", lambda **backend: local)
    platform: Any = type("Chips", (JaxPlatform,), {"name": "tpu", "device": SimpleNamespace})()
    opened = platform.open(["2", "1"], EngineConfig())
    assert opened.devices == [local[2], local[1]] and (opened.info.id, opened.info.total_bytes) == ("tpu:2", 7)
    assert platform.open([], EngineConfig()).devices == local
    for unknown in ("4", "x"):
        with pytest.raises(DeviceUnavailable, match=f"no tpu:{unknown}; there are tpu:0, tpu:1, tpu:2, tpu:3"):
            platform.open([unknown], EngineConfig())


def test_parameters_are_cut_as_declared() -> None:
    from jax.sharding import AbstractMesh, PartitionSpec

    from headrace.core.runner.jax_sharding import is_cut_by_parts, param_sharding

    mesh: Any = AbstractMesh((2,), ("tp",))
    declared = {param.name: param for param in declare_params(tiny_spec())}
    cuts = {name: param_sharding(param, mesh).spec for name, param in declared.items()}
    assert cuts["layers.0.attn.qkv_proj.weight"] == PartitionSpec("tp")
    assert cuts["layers.0.attn.o_proj.weight"] == PartitionSpec(None, "tp")
    assert cuts["final_norm.weight"] == PartitionSpec()
    assert cuts["embed_tokens.weight"] == PartitionSpec(), "211 rows cannot be halved"
    assert is_cut_by_parts(declared["layers.0.mlp.gate_up_proj.weight"], mesh)
