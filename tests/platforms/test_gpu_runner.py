"""How a GPU records its decodes, over a stand-in for torch's module of a GPU: graphs are lists of operations, streams
and events only note the order in which they are asked for."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.core.config import DeviceConfig, EngineConfig
from headrace.core.devices import open_device
from headrace.core.platform import Caps, DeviceInfo, RunnerConfig
from headrace.core.runner.buckets import Buckets
from headrace.core.runner.torch import TorchDevice, TorchRunner
from headrace.core.runner.torch_graphs import Notes, Rerun
from headrace.core.self_test import Driver, dummy_weights, load_runner, tiny_config, tiny_spec
from headrace.core.stages import IntArray
from headrace.platforms.cuda.device import CudaPlatform
from headrace.platforms.gpu.device import GpuDevice, device_memory
from headrace.platforms.gpu.runner import GRID, GpuRunner
from headrace.platforms.static.ops import static_provider

PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1])


class FakeStream:
    """A stream of FakeGpu."""

    def __init__(self, gpu: "FakeGpu") -> None:
        self.gpu = gpu

    def wait_stream(self, other: "FakeStream") -> None:
        self.gpu.log.append("wait")


class FakeGpu:
    """torch's module of a GPU, as far as the runner uses it; what is computed is computed on the processor."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._current = FakeStream(self)
        gpu = self

        class CUDAGraph:
            """A graph whose operations `graph` has noted."""

            def __init__(self) -> None:
                self.again: Callable[[], None] = lambda: None

            def replay(self) -> None:
                """Run them again."""
                gpu.log.append("replay")
                self.again()

        class Event:
            """An event that has always happened when it is asked."""

            def record(self) -> None:
                """Note it."""
                gpu.log.append("event")

            def query(self) -> bool:
                """Yes."""
                return True

            def synchronize(self) -> None:
                """Note that somebody waits."""
                gpu.log.append("synchronize")

        self.CUDAGraph, self.Event = CUDAGraph, Event

    def Stream(self) -> FakeStream:
        """Another stream."""
        self.log.append("new stream")
        return FakeStream(self)

    def current_stream(self) -> FakeStream:
        """The default stream."""
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """Work inside goes to that stream."""
        self.log.append("side stream")
        yield

    def graph_pool_handle(self) -> str:
        """One pool."""
        return "pool"

    @contextlib.contextmanager
    def graph(self, graph: Any, pool: str, stream: FakeStream, capture_error_mode: str = "global") -> Iterator[None]:
        """Note what is computed inside."""
        assert capture_error_mode == "thread_local", "what other threads ask of the driver would end the capture"
        assert pool == "pool" and isinstance(stream, FakeStream)
        self.log.append("capture")
        with Notes() as notes:
            yield
        results = notes.results()
        graph.again = lambda: notes.replay(results)

    def synchronize(self) -> None:
        """Note that somebody waits for the whole device."""
        self.log.append("synchronize all")


class FakeDevice(TorchDevice):
    """A processor that takes the place of a GPU."""

    def __init__(self, gpu: FakeGpu | None) -> None:
        info = DeviceInfo(id="fake", name="fake", kind="gpu", total_bytes=0, free_bytes=0)
        super().__init__(info=info, caps=Caps(capture="graph", depth=1), torch_device="cpu")
        self.gpu = gpu

    def activate(self) -> None:
        """Note it."""
        if self.gpu is not None:
            self.gpu.log.append("activate")

    def providers(self) -> Any:
        """Ops that read nothing on the host."""
        if self.gpu is not None:
            self.gpu.log.append("providers")
        return (static_provider(),)

    def runner(self, config: RunnerConfig) -> TorchRunner:
        """The runner under test; page-locked memory needs a driver, so copies take plain memory."""
        return UnpinnedRunner(config, self, self.gpu)


class UnpinnedRunner(GpuRunner):
    """GpuRunner without page-locked memory."""

    def stage(self, words: IntArray) -> torch.Tensor:
        """Plain memory."""
        return torch.from_numpy(words.copy())

    def receive(self, words: Any, finish: Any) -> Any:
        """As where there is no GPU."""
        return TorchRunner.receive(self, words, finish)


def run(device: Any, config: RunnerConfig) -> tuple[list[list[int]], Any]:
    """Tokens of a few steps: a prefill in chunks beside decodes, then decodes of one and of two requests."""
    torch.set_num_threads(1)
    runner = load_runner(device, config)
    driver = Driver(runner, config)
    driver.add(PROMPTS[0])
    driver.add(PROMPTS[1], temperature=0.8, seed=5)
    for counts in ({0: 5}, {0: 3, 1: 3}, {0: 1, 1: 1}, {1: 1}, {0: 1}, {0: 1, 1: 1}):
        driver.step(counts)
    return [request.token_ids for request in driver.requests], runner


def test_replayed_decodes_give_what_the_definitions_give() -> None:
    config = tiny_config(tiny_spec(window=24))
    want, _ = run(open_device(EngineConfig(device=DeviceConfig(device="reference", threads=1))), config)
    gpu = FakeGpu()
    got, runner = run(FakeDevice(gpu), config)
    assert got == want
    buckets = runner.decode_buckets()
    assert gpu.log.count("capture") == len(buckets) == runner.num_programs, "every bucket once, none after warmup"
    after = gpu.log[gpu.log.index("synchronize all") + 1 :]
    assert after.count("replay") == 2 * 4, "a forward pass and sampling for each step of decodes alone"
    assert "synchronize all" not in after and "capture" not in after


@pytest.mark.parametrize(("max_model_len", "lens"), [(512, [[512]]), (200, [[200, 200, 112]]), (30, [[30] * 8])])
def test_prompts_of_all_sizes_run_before_the_first_request(max_model_len: int, lens: list[list[int]]) -> None:
    """Their kernels are compiled then, and what the largest takes is found missing at the start, not in traffic."""
    config = dataclasses.replace(tiny_config(tiny_spec()), max_model_len=max_model_len)
    gpu, seen = FakeGpu(), list[list[int]]()
    runner: Any = load_runner(FakeDevice(gpu), config)
    runner.kv_init([8])
    caches = [cache[1:].clone() for pair in runner._kv.layers for cache in pair]
    step = runner.step

    def noted(batch: Any) -> Any:
        assert "capture" not in gpu.log, "what graphs leave is not taken from the largest step"
        forward = batch.forward
        assert len(forward.input_ids) == forward.query_start_loc[-1] == forward.seq_lens.sum()
        seen.append(np.diff(forward.query_start_loc).tolist())
        return step(batch)

    runner.step = noted
    runner.warmup()
    small = [[size] if size <= max_model_len else [30] * (size // 30) + [size % 30] for size in (2, 32, 64, 128)]
    assert seen == small + lens
    assert runner.num_programs == len(runner.decode_buckets())
    after = [cache[1:] for pair in runner._kv.layers for cache in pair]
    assert all(map(torch.equal, caches, after)), "only the null block may have been written"


def test_whatever_runs_on_a_gpu_makes_it_the_current_one_first() -> None:
    """Another model of the process may have made its own GPU the current one since."""
    config = tiny_config(tiny_spec())
    gpu = FakeGpu()
    runner = FakeDevice(gpu).runner(config)
    assert [entry for entry in gpu.log if entry != "activate"] == ["new stream", "providers"]
    assert gpu.log[0] == "activate", "streams are the current GPU's"
    assert gpu.log[gpu.log.index("providers") - 1] == "activate", "providers try their kernels on the current GPU"
    TorchRunner(config, FakeDevice(gpu))
    assert gpu.log[-2:] == ["activate", "providers"], "a runner that records nothing tries them, too"
    gpu.log.clear()
    runner.load(dummy_weights(config.spec))
    assert gpu.log.pop(0) == "activate" and not gpu.log
    runner.kv_init([8])
    assert gpu.log == ["activate"]
    gpu.log.clear()
    runner.warmup()
    assert gpu.log[0] == "activate"
    driver = Driver(runner, config)
    driver.add(PROMPTS[0])
    for counts in ({0: len(PROMPTS[0])}, {0: 1}):
        gpu.log.clear()
        driver.step(counts)
        assert gpu.log[0] == "activate"


def test_a_gpu_is_made_current_by_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    device: Any = object.__new__(GpuDevice)
    device.vendor, device.torch_device, device.is_emulated = CudaPlatform.vendor, "cuda:3", False
    device.activate()
    assert chosen == ["cuda:3"]


def test_an_opened_gpu_multiplies_at_full_precision_and_leaves_cudnn_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image with TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 would compute float32 with 10 bits, and parts of a product of
    bfloat16 are added in bfloat16 by default. cuDNN's attention plans on the host for each new length."""
    calls: dict[str, Any] = dict(is_available=True, device_count=1, set_device=None, mem_get_info=(1, 2))
    calls |= dict(get_device_name="a GPU", get_device_capability=(9, 0))
    for name, result in calls.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, result=result: result)
    monkeypatch.setattr("headrace.platforms.gpu.device.GpuDevice", lambda *args, **options: "opened")
    matmul = torch.backends.cuda.matmul
    names = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    before = torch.get_float32_matmul_precision(), [getattr(matmul, name) for name in names]
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        torch.set_float32_matmul_precision("high")
        opened: Any = CudaPlatform().open(["0"], EngineConfig())
        assert opened == "opened" and torch.get_float32_matmul_precision() == "highest"
        assert not any(getattr(matmul, name) for name in names)
        assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
        torch.set_float32_matmul_precision(before[0])
        for name, value in zip(names, before[1], strict=True):
            setattr(matmul, name, value)


def test_memory_of_a_gpu_whose_driver_does_not_tell_what_is_free() -> None:
    class Silent:
        """torch.xpu of an Arc without Level Zero's Sysman."""

        def mem_get_info(self, device: Any) -> tuple[int, int]:
            raise RuntimeError("The device (Intel(R) Arc(TM) A770) doesn't support querying the free memory")

        def get_device_properties(self, device: Any) -> Any:
            return SimpleNamespace(total_memory=16 << 30)

        def memory_reserved(self, device: Any) -> int:
            return 1 << 30

    assert device_memory(Silent(), "xpu:0") == (15 << 30, 16 << 30)


def test_without_graphs_every_step_runs_kernel_by_kernel() -> None:
    config = tiny_config(tiny_spec())
    gpu: Any = FakeGpu()
    del gpu.CUDAGraph
    got, runner = run(FakeDevice(gpu), config)
    want, _ = run(open_device(EngineConfig(device=DeviceConfig(device="reference", threads=1))), config)
    assert got == want and runner.num_programs is None and "capture" not in gpu.log


def test_an_emulated_gpu_computes_only_what_is_asked_for() -> None:
    """Its steps take seconds: none runs before the first request, and none is run to be recorded."""
    config, calls = tiny_config(tiny_spec()), list[int]()
    runner: Any = load_runner(FakeDevice(None), config)
    runner.step = lambda batch: calls.append(1)
    runner.warmup()
    assert not calls and runner.num_programs is None
    array = torch.zeros(2)

    def function() -> torch.Tensor:
        calls.append(1)
        return array + len(calls)

    replay = Rerun().record(function)
    assert not calls
    first = replay()
    assert first.tolist() == [1, 1] and replay() is first and first.tolist() == [2, 2] and len(calls) == 2


def test_decodes_are_recorded_from_the_largest_to_one_request() -> None:
    config = tiny_config(tiny_spec())
    sizes = Buckets(config, GRID).num_reqs
    assert sizes[0] == 1 and sizes[-1] == config.max_num_seqs
    assert all(b == 2 * a for a, b in zip(sizes, sizes[1:-1], strict=False))
    runner: Any = FakeDevice(None).runner(config)
    forward = [bucket.num_reqs for bucket in runner.decode_buckets() if hasattr(bucket, "width")]
    assert forward == sorted(forward, reverse=True) and set(forward) == set(sizes)
    assert np.all([bucket.decode for bucket in runner.decode_buckets() if hasattr(bucket, "width")])
