"""Steps on a GPU: decodes as recorded graphs by bucket, all else kernel by kernel, copies beside the computing."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from headrace.core.platform import KVPlan, Pending, RunnerConfig
from headrace.core.runner.activations import step_bytes
from headrace.core.runner.buckets import Bucket, Grid
from headrace.core.runner.done import Arriving
from headrace.core.runner.torch import TorchDevice, TorchRunner
from headrace.core.runner.torch_graphs import GraphRunner, Recorder, Rerun
from headrace.core.stages import Array, IntArray, StepInput, StepOutput

GRID = Grid(num_reqs=2, num_tokens=2, width=4, smallest_width=32, smallest_reqs=1)
"""A row of padding costs a row of experts, and a block of a wide table a look at it."""

WARM_SIZES = (2, 32, 64, 128)
"""Products with quantized weights take tiles of 16 rows, and of powers of two up to 128."""


class GpuRunner(GraphRunner):
    """Records what a step of one token a request does, for every bucket, before the first request.

    Prefill keeps the processor busy enough that launching kernel by kernel hides behind it, and padding would cost
    more than it saves; so a step with more tokens runs without a graph. module: torch's module for the device, None
    where it is emulated. Nothing waits for the GPU but `Arriving.result`.
    """

    def __init__(self, config: RunnerConfig, device: TorchDevice, module: Any) -> None:
        device.activate()  # streams are the current device's
        has_graphs = module is None or graph_class(module) is not None
        recorder: Recorder = Rerun() if module is None or not has_graphs else StreamGraphs(module)
        super().__init__(config, device, recorder, GRID)
        self._module = module
        self._records = has_graphs and config.spec.kind != "encoder" and config.spec.pooler is None

    @property
    def num_programs(self) -> int | None:
        """Graphs recorded so far; an emulated device records when it is asked to, as that costs nothing."""
        return None if self._module is None or not self._records else self.num_recorded

    def kv_plan(self) -> KVPlan:
        """Bytes of one block, and what it leaves to the largest step and to graphs."""
        return dataclasses.replace(super().kv_plan(), step_bytes=step_bytes(self.config))

    def warmup(self) -> None:
        """Load libraries, compile kernels, try the largest step, and record the buckets of decoding. An emulated
        device has nothing to load or compile, and its recordings cost nothing."""
        if self._module is None:
            return
        if not self._records:
            TorchRunner.warmup(self)
        for num_tokens in self.warm_sizes():
            self.warm_step(num_tokens)
        if self._records:
            with self.errors("recorded steps"):
                for bucket in self.decode_buckets():
                    self.program(bucket)
        self._module.synchronize()

    def warm_sizes(self) -> list[int]:
        """Tokens of the prompts that warmup runs: one step for each way in which kernels are cut, and the largest."""
        config = self.config
        most = min(config.max_num_batched_tokens, config.max_num_seqs * config.max_model_len)
        return [*(size for size in WARM_SIZES if size < most), most]

    def decode_buckets(self) -> list[Bucket]:
        """What warmup records: forward passes of one token a request, largest first so that the smaller ones live in
        the memory of the larger, and sampling."""
        forward = [bucket for bucket in self.buckets.all_forward() if bucket.decode]
        forward.sort(key=lambda bucket: (bucket.num_reqs, bucket.width), reverse=True)
        return [*forward, *reversed(self.buckets.all_sample())]

    def step(self, batch: StepInput) -> Pending:
        """Start a step: a replay for decodes."""
        forward = batch.forward
        is_decode = forward.max_query_len == 1 and batch.prompt_logprobs is None and batch.pooling is None
        has_images = batch.encoder is not None or forward.image_rows is not None or forward.reach is not None
        if self._records and is_decode and not has_images:
            return GraphRunner.step(self, batch)
        return TorchRunner.step(self, batch)

    def stage(self, words: IntArray) -> torch.Tensor:
        """Page-locked where there is a GPU, so that the copy does not wait; torch keeps it until the copy is done."""
        host = torch.from_numpy(words)
        return host if self._module is None else host.pin_memory()

    def send(self, words: IntArray) -> Array:
        """A step's input on the device, behind what was queued before it."""
        if self._module is None:
            return super().send(words)
        return self.stage(words).to(self.device.torch_device, non_blocking=True)

    def receive(self, words: Array, finish: Callable[[IntArray], StepOutput]) -> Pending:
        """Start the copy to the host; the next step may be queued behind it at once."""
        if self._module is None:
            return super().receive(words, finish)
        host = torch.empty(words.shape, dtype=torch.int32, pin_memory=True)
        host.copy_(words.view(torch.int32), non_blocking=True)
        arrived = self._module.Event()
        arrived.record()
        return Arriving(host, arrived, finish)


class StreamGraphs:
    """Records graphs on a stream of their own, all in one memory pool: graphs run one after another, so that each may
    use the memory that another one's intermediate results had."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._stream = module.Stream()
        self._pool = module.graph_pool_handle()
        # "global" forbids calls of other threads, as NCCL's watchdog makes them; Intel's graphs have no modes.
        self._mode = {"capture_error_mode": "thread_local"} if hasattr(module, "CUDAGraph") else {}

    def record(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Run `function` once, so that kernels are compiled and libraries loaded, then capture it."""
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            function()
        self._module.current_stream().wait_stream(self._stream)
        kind = graph_class(self._module)
        assert kind is not None
        graph = kind()
        with self._module.graph(graph, pool=self._pool, stream=self._stream, **self._mode):
            result = function()

        def replay() -> Any:
            graph.replay()
            return result

        replay()
        return replay


def graph_class(module: Any) -> Any:
    """The class of recorded graphs in torch's module of a GPU; None if this torch has none for it."""
    return getattr(module, "CUDAGraph", None) or getattr(module, "XPUGraph", None)
