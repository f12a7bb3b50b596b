"""The gaudi platform: detection, recorded steps in the place of graphs, ops of static shapes, its bridge."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headrace import LLM
from headrace.core.config import DeviceConfig, EngineConfig
from headrace.core.devices import find_platforms, open_device
from headrace.core.errors import DeviceUnavailable, Unsupported
from headrace.core.ops import OpTable
from headrace.core.ops import sampling as definitions
from headrace.core.platform import Device, Status
from headrace.core.plugin_loader import load_plugins
from headrace.core.runner.torch_graphs import GraphRunner, OperationList
from headrace.core.self_test import Driver, load_runner, tiny_config, tiny_spec
from headrace.kernels.torch.sampling import gumbel_noise
from headrace.platforms.conformance.kit import all_checks, run_check
from headrace.platforms.conformance.registry import Subject
from headrace.platforms.gaudi import detect
from headrace.platforms.gaudi.device import GaudiPlatform, HpuGraphs
from headrace.platforms.static.ops import static_provider
from tiny_server_model import tiny_server_model

CHECKS = (
    "attention.window_softcap.bfloat16",
    "attention.sinks.float32",
    "attention.int8_cache.float32",
    "ops.selective_scan.float32",
    "ops.gated_delta.float32",
    "model.batch",
    "model.seeds",
    "model.run_ahead",
    "memory.out_of_memory",
    "runner.close",
)


def emulated() -> Device:
    return open_device(EngineConfig(device=DeviceConfig(device="gaudi:emulated", threads=1)))


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: str) -> None:
    result = run_check(all_checks()[check], Subject(emulated(), load_plugins()))
    assert result.outcome == "passed", result.detail


def test_a_cache_of_integers_gives_the_references_tokens() -> None:
    config = replace(tiny_config(tiny_spec(window=24)), kv_dtype="int8")
    found = []
    for device in (emulated(), open_device(EngineConfig(device=DeviceConfig(device="reference", threads=1)))):
        driver = Driver(load_runner(device, config), config)
        found.append(driver.generate([7 * i % 211 for i in range(40)], 8))
    assert found[0] == found[1]


def test_nothing_is_recorded_after_warmup() -> None:
    config = tiny_config(tiny_spec())
    runner = load_runner(emulated(), config)
    assert isinstance(runner, GraphRunner)
    driver = Driver(runner, config)
    GraphRunner.warmup(runner)  # which an emulation leaves out
    recorded = len(runner._recorded)
    rng = np.random.default_rng(0)
    for length in (1, 7, 33, 129):
        driver.remove_all()
        driver.generate(rng.integers(0, 211, length).tolist(), 3)
    driver.remove_all()
    rows = [driver.add([3, 4, 5], temperature=1.0, seed=seed) for seed in range(3)]
    driver.step({row: 3 for row in rows})
    driver.step({row: 1 for row in rows}, num_logprobs=5)
    assert len(runner._recorded) == recorded == len(runner.buckets.all())


# ---- the recorder ---------------------------------------------------------------------------------------------
def test_a_replay_computes_with_what_its_arrays_hold_by_then() -> None:
    weight, cache = torch.randn(4, 4), torch.zeros(6, 4)
    x, slots = torch.randn(2, 4), torch.tensor([1, 3], dtype=torch.int32)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        y = OpTable.scale(OpTable.linear(x, weight), 1.5)
        cache[slots.long()] = y
        return y.view(-1)[2:], cache.sum(0)

    with torch.inference_mode():
        replay = OperationList().record(step)
        x.copy_(torch.randn(2, 4))
        slots.copy_(torch.tensor([0, 5]))
        before = cache.clone()
        y, total = replay()
    want = x.double() @ weight.double().T * 1.5
    torch.testing.assert_close(y.double(), want.view(-1)[2:], rtol=1e-5, atol=1e-6)
    before = before.clone()  # outside of inference mode it may be written to
    before[[0, 5]] = want.float()
    torch.testing.assert_close(cache, before)
    torch.testing.assert_close(total, before.sum(0))


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda x: x * x.max().item(), "reads a value on the host"),
        (lambda x: x[x > 0], "reads a value on the host"),
        (lambda x: x.double(), "float64"),
        (lambda x: (x + 1)[1:].add_(1), "writes to a view"),
        (lambda x: x.view(2, 2).index_put_((torch.tensor([0]),), x[:2]), "writes to a view"),
    ],
)
def test_a_step_that_no_graph_could_hold_is_refused(step: Callable[[Any], Any], words: str) -> None:
    x = torch.randn(4)
    with torch.inference_mode(), pytest.raises(Unsupported, match=words):
        OperationList().record(lambda: step(x))


# ---- ops of static shapes -------------------------------------------------------------------------------------
def test_noise_of_32_bits_is_the_definitions() -> None:
    rng = np.random.default_rng(0)
    seeds, positions = (torch.from_numpy(rng.integers(-(2**31), 2**31, 9).astype(np.int32)) for _ in range(2))
    want = definitions.gumbel_noise(seeds, positions, vocab_size=50_000)
    assert torch.equal(gumbel_noise(seeds, positions, vocab_size=50_000), want)


@pytest.mark.parametrize("scale_input", [False, True])
@pytest.mark.parametrize("num_tokens", [2, 9], ids=["gathered weights", "all experts"])
def test_experts_are_the_definitions(num_tokens: int, scale_input: bool) -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(num_tokens, 32).double(), torch.rand(num_tokens, 2).double()
    experts = torch.stack([torch.randperm(6)[:2] for _ in range(num_tokens)]).int()
    gate_up, down = torch.randn(6, 48, 32).double(), torch.randn(6, 32, 24).double()
    biases = torch.randn(6 * 48), torch.randn(6 * 32)
    different: list[dict[str, Any]] = [dict(activation="gelu_tanh"), dict(clamp=2.0)]
    for options in different:
        arguments = (x, weights, experts, gate_up, down, *biases)
        got = static_provider().ops["grouped_experts"](*arguments, scale_input=scale_input, **options)
        want = OpTable.grouped_experts(*arguments, scale_input=scale_input, **options)
        torch.testing.assert_close(got, want)


def test_a_convolution_of_one_tap_has_nothing_to_remember() -> None:
    x, weight, bias = torch.randn(5, 6), torch.randn(6, 1, 1), torch.randn(6)
    starts, before = torch.tensor([0, 3, 5]), torch.tensor([[-1], [2]])
    empty = torch.zeros(8, 0, 6)
    got, state = static_provider().ops["causal_conv"](x, weight, bias, empty, starts, before, torch.arange(1, 6))
    assert torch.equal(got, x * weight[:, 0, 0] + bias) and state is empty


def test_penalties_of_padding_change_nothing() -> None:
    torch.manual_seed(0)
    logits, one = torch.randn(3, 9), torch.ones(3)
    rows, tokens, counts = (torch.tensor(v, dtype=torch.int32) for v in ([0, 2, -1, -1], [8, 1, 0, 0], [2, 0, 0, 0]))
    got = OpTable.apply_penalties(logits, rows, tokens, counts, one * 2, one * 0.5, one * 0.25)
    want = OpTable.apply_penalties(logits, rows[:2], tokens[:2], counts[:2], one * 2, one * 0.5, one * 0.25)
    assert torch.equal(got, want)


@pytest.mark.parametrize("options", [{}, {"window": 9, "softcap": 2.0}, {"bias": True}], ids=str)
def test_attention_of_encoders_is_the_definitions(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(300, 6, 16).double(), torch.randn(300, 3, 16).double(), torch.randn(300, 3, 16)
    starts = torch.tensor([0, 3, 3, 290, 300], dtype=torch.int32)
    bias = [torch.randn(32, 6)] if options.pop("bias", False) else []
    attend = static_provider().ops["encoder_attention"]
    got = attend(query, key, value.double(), starts, *bias, scale=0.25, **options)
    torch.testing.assert_close(
        got, OpTable.encoder_attention(query, key, value.double(), starts, *bias, scale=0.25, **options)
    )
    first, last = torch.tensor([0, 2, 6]), torch.tensor([2, 5, 7])
    rows = query.flatten(1)
    torch.testing.assert_close(
        static_provider().ops["mean_rows"](rows, first, last), OpTable.mean_rows(rows, first, last)
    )


# ---- detection and the bridge ---------------------------------------------------------------------------------
def test_accelerators_are_told_from_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert detect.detect(tmp_path).reason == "no accelerator of this machine is Habana's"
    for name, vendor, device in (("accel0", "0x8086", "0x7d1d"), ("accel1", "0x1da3", "0x1020")):
        folder = tmp_path / "sys/class/accel" / name / "device"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "device").write_text(device + "\n")
    node = tmp_path / "dev/accel/accel1"
    assert detect.accelerators(tmp_path) == [(node, "Gaudi2")]
    assert f"may not open {node}" in detect.detect(tmp_path).reason
    node.parent.mkdir(parents=True)
    node.touch()
    probe = detect.detect(tmp_path)
    assert (probe.status, probe.reason) == (Status.MISSING, "the package habana_frameworks is not installed")
    assert "Intel's own package index" in probe.fix
    assert [info.id for info in probe.devices] == ["gaudi:0"]
    monkeypatch.setattr(detect, "find_spec", lambda name: object())
    assert detect.detect(tmp_path).status == Status.OK


def test_a_device_that_is_not_here_says_so() -> None:
    [found] = [item for item in find_platforms(load_plugins()) if item.spec.name == "gaudi"]
    assert found.probe.status == Status.NO_DEVICE
    assert "gaudi:emulated" in found.probe.fix
    with pytest.raises(DeviceUnavailable, match="habana_frameworks"):
        GaudiPlatform().open(["0"], EngineConfig())
    with pytest.raises(DeviceUnavailable, match="habana_frameworks"):
        GaudiPlatform().open(["0", "1"], EngineConfig())
    with pytest.raises(DeviceUnavailable, match="takes indices, got first"):
        GaudiPlatform().open(["first"], EngineConfig())


class Bridge:
    """What habana_frameworks.torch offers, as far as headrace uses it; notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.hpu = self

    def is_available(self) -> bool:
        return True

    def mem_get_info(self) -> tuple[int, int]:
        return 90 << 30, 96 << 30

    def get_device_name(self) -> str:
        return "GAUDI2"

    def default_stream(self) -> str:
        return "default"

    def stream(self, stream: str) -> Any:
        from contextlib import nullcontext

        self.asked.append(f"stream {stream}")
        return nullcontext()

    def HPUGraph(self) -> Any:
        return SimpleNamespace(
            **{
                name: (lambda name=name: self.asked.append(name))
                for name in ("capture_begin", "capture_end", "replay")
            }
        )


def test_the_bridge_is_asked_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    bridge = Bridge()
    monkeypatch.setitem(sys.modules, "habana_frameworks", bridge)
    monkeypatch.setitem(sys.modules, "habana_frameworks.torch", bridge)
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", "0")
    monkeypatch.setenv("PT_HPU_ENABLE_LAZY_COLLECTIVES", "true")  # so that what is set here is undone
    monkeypatch.delenv("PT_HPU_ENABLE_LAZY_COLLECTIVES")
    device = GaudiPlatform().open(["3"], EngineConfig())
    assert (device.info.id, device.info.name, device.caps.dtypes[0]) == ("gaudi:3", "GAUDI2", "bfloat16")
    assert device.memory().used_bytes == 8 << 30, "6 in use and a reserve of 2"
    assert "float16" in device.caps.dtypes
    monkeypatch.setattr(bridge, "get_device_name", lambda: "GAUDI")
    assert "float16" not in GaudiPlatform().open(["3"], EngineConfig()).caps.dtypes, "the first generation has none"
    assert "PT_HPU_ENABLE_LAZY_COLLECTIVES" not in os.environ
    GaudiPlatform().open(["3", "4"], EngineConfig())
    assert os.environ["PT_HPU_ENABLE_LAZY_COLLECTIVES"] == "true"

    def step() -> int:
        bridge.asked.append("step")
        return 7

    replay = HpuGraphs(bridge).record(step)
    assert replay() == 7
    assert bridge.asked == ["stream default", "capture_begin", "step", "capture_end", "replay", "replay"]


def test_an_emulation_takes_little_memory_unless_it_is_told_to(tmp_path: Path) -> None:
    """Its steps walk over the whole cache; a quarter of a machine's memory would take minutes a token."""
    folder = str(tiny_server_model(tmp_path / "model"))
    for kv_memory, most in (("auto", 64 << 20), ("96MiB", 96 << 20)):
        with LLM(
            folder, device="gaudi:emulated", load_format="dummy", kv_memory=kv_memory, max_num_seqs=2048, threads=1
        ) as llm:
            assert 0.9 * most < llm.built.capacity.kv.total_bytes <= most
            assert llm.built.capacity.reason.startswith(
                "auto: this device takes 64.0 MiB" if kv_memory == "auto" else "asked"
            )
