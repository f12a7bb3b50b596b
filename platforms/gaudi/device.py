"""A Gaudi accelerator under torch: static shapes, HPU graphs. Emulated, the same steps on this processor.

torch calls the device hpu; the vendor's bridge (habana_frameworks) adds it and is imported here alone.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

from headrace.core.config import KV_DTYPES, EngineConfig
from headrace.core.devices import EMULATED, EMULATED_KV_BYTES, rank_devices
from headrace.core.errors import DeviceUnavailable
from headrace.core.models.needs import FEATURES
from headrace.core.platform import Caps, Device, DeviceInfo, Memory, OpProvider, Pending, Platform, RunnerConfig
from headrace.core.runner.buckets import Grid
from headrace.core.runner.done import Arriving
from headrace.core.runner.torch import TorchDevice
from headrace.core.runner.torch_graphs import GraphRunner, OperationList, Recorder
from headrace.core.stages import Array, IntArray, StepOutput

from ..cpu.memory import host_memory
from ..static.ops import static_provider
from .detect import BRIDGE, FIX

GRID = Grid(num_reqs=4, num_tokens=4, width=4, smallest_width=16, few_reqs=True)
"""Attention computes the whole width of a table, so sizes are closer together than where it stops early."""
FIRST = "GAUDI"
"""What the bridge calls an accelerator of the first generation, which has no float16."""
RESERVE_BYTES = 2 << 30
"""What the runtime and the graphs take later."""


class GaudiPlatform(Platform):
    """Opens accelerators by their indices, or the emulated device."""

    def open(self, ids: Sequence[str], config: EngineConfig) -> Device:
        """Open it. Raises DeviceUnavailable."""
        ranks = rank_devices("gaudi", ids, config)
        if list(ids) == [EMULATED]:
            return GaudiDevice(_emulated_info(), torch_device="cpu", bridge=None, ranks=ranks)
        if not all(text.isdecimal() for text in ids):
            raise DeviceUnavailable(
                f"device gaudi takes indices, got {','.join(ids)}",
                remedies=["--device gaudi:0", f"--device gaudi:{EMULATED}"],
            )
        # Read when the bridge starts. A process has one accelerator, which is its first; graphs need the lazy mode.
        os.environ.setdefault("PT_HPU_LAZY_MODE", "1")
        if ranks:  # else no graph holds a collective
            os.environ.setdefault("PT_HPU_ENABLE_LAZY_COLLECTIVES", "true")
        if ids or ranks:
            os.environ["HABANA_VISIBLE_MODULES"] = ids[0] if ids else "0"
        try:
            bridge = import_module(f"{BRIDGE}.torch")
        except ImportError as error:
            raise DeviceUnavailable(
                f"the bridge between torch and Gaudi does not load: {error}", remedies=[FIX, "headrace devices"]
            ) from error
        if not bridge.hpu.is_available():
            raise DeviceUnavailable(
                f"torch {torch.__version__} sees no Gaudi accelerator", remedies=["hl-smi", "headrace devices"]
            )
        free, total = bridge.hpu.mem_get_info()
        info = DeviceInfo(
            id=f"gaudi:{','.join(ids) or 0}",
            name=bridge.hpu.get_device_name(),
            kind="accelerator",
            total_bytes=total,
            free_bytes=free,
        )
        return GaudiDevice(info, torch_device="hpu", bridge=bridge, ranks=ranks)


class GaudiDevice(TorchDevice):
    """One accelerator. bridge: habana_frameworks.torch, None where it is emulated."""

    def __init__(self, info: DeviceInfo, *, torch_device: str, bridge: Any, ranks: Sequence[str] = ()) -> None:
        self.ranks = ranks
        self.collectives = "gloo" if bridge is None else "hccl"
        dtypes: tuple[str, ...] = (
            ("float32", "bfloat16", "float16") if bridge is None else ("bfloat16", "float16", "float32")
        )
        if info.name == FIRST:
            dtypes = ("bfloat16", "float32")
        caps = Caps(
            dtypes=dtypes,
            kv_dtypes=KV_DTYPES,
            depth=1,
            capture="graph",
            bucketed=True,
            shared_memory=bridge is None,
            auto_kv_bytes=EMULATED_KV_BYTES if bridge is None else 0,
            features=frozenset(FEATURES) - {"foreign_code"},  # which no recorder can follow
        )
        super().__init__(info=info, caps=caps, torch_device=torch_device)
        self.bridge = bridge

    def own_runner(self, config: RunnerConfig) -> GraphRunner:
        """A runner of recorded steps."""
        recorder: Recorder = OperationList() if self.bridge is None else HpuGraphs(self.bridge)
        return GaudiRunner(config, self, recorder, GRID)

    def providers(self) -> Sequence[OpProvider]:
        """Ops of static shapes; the definitions serve the rest."""
        return (static_provider(),)

    def memory(self) -> Memory:
        """What the bridge says, less a reserve."""
        if self.bridge is None:
            return host_memory()
        free, total = self.bridge.hpu.mem_get_info()
        free = max(0, free - RESERVE_BYTES)
        return Memory(total_bytes=total, free_bytes=free, used_bytes=total - free)

    def describe(self) -> Mapping[str, str]:
        """How steps are recorded."""
        return {
            "steps": "HPU graphs" if self.bridge is not None else "recorded operations",
            "torch": torch.__version__,
        }


class GaudiRunner(GraphRunner):
    """Recorded steps whose results come to the host beside the next step."""

    device: GaudiDevice

    @property
    def num_programs(self) -> int | None:
        """Graphs recorded so far; an emulation records when it is asked to, as that costs nothing."""
        return None if self.device.bridge is None else self.num_recorded

    def warmup(self) -> None:
        """Record every bucket. An emulation, which has nothing to compile, records a bucket when it is needed."""
        if self.device.bridge is not None:
            super().warmup()

    def receive(self, words: Array, finish: Callable[[IntArray], StepOutput]) -> Pending:
        """Start the copy; the queue runs in order, so a step that follows does not disturb it."""
        if self.device.bridge is None:
            return super().receive(words, finish)
        host = words.to("cpu", non_blocking=True)
        arrived = self.device.bridge.hpu.Event()
        arrived.record()
        return Arriving(host, arrived, finish)


class HpuGraphs:
    """Records steps as HPU graphs on the default stream, so that inputs, replays and results are in order."""

    def __init__(self, bridge: Any) -> None:
        self._hpu = bridge.hpu
        self._stream = bridge.hpu.default_stream()

    def record(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Capture what `function` queues, then run it once."""
        graph = self._hpu.HPUGraph()
        with self._hpu.stream(self._stream):
            graph.capture_begin()
            result = function()
            graph.capture_end()

        def replay() -> Any:
            graph.replay()
            return result

        replay()
        return replay


def _emulated_info() -> DeviceInfo:
    memory = host_memory()
    return DeviceInfo(
        id=f"gaudi:{EMULATED}",
        name="this processor in the place of gaudi",
        kind="accelerator",
        total_bytes=memory.total_bytes,
        free_bytes=memory.free_bytes,
    )
