"""The null device: steps without arithmetic, so that what remains is our own overhead."""

from collections.abc import Mapping, Sequence

from headrace.core.config import KV_DTYPES, EngineConfig
from headrace.core.errors import DeviceUnavailable
from headrace.core.models.needs import FEATURES
from headrace.core.platform import (
    Caps,
    Device,
    DeviceInfo,
    Memory,
    Platform,
    Probe,
    Runner,
    RunnerConfig,
    Status,
)

from ..cpu.memory import host_memory

MAX_DEPTH = 2
"""Steps in flight at most, as `--device null:2` asks."""


def detect() -> Probe:
    """Always usable."""
    return Probe(status=Status.OK, devices=(_info(),))


class NullPlatform(Platform):
    """Opens a device whose id is its run-ahead depth: null, null:0, null:1 or null:2."""

    def open(self, ids: Sequence[str], config: EngineConfig) -> Device:
        """Open it. Raises DeviceUnavailable for another id."""
        depths = [str(depth) for depth in range(MAX_DEPTH + 1)]
        if len(ids) > 1 or (ids and ids[0] not in depths):
            raise DeviceUnavailable(
                f"device null takes its run-ahead depth as id, {', '.join(depths)}; got {','.join(ids)}",
                remedies=["--device null", f"--device null:{MAX_DEPTH}"],
            )
        return NullDevice(depth=int(ids[0]) if ids else 0)


class NullDevice(Device):
    """Needs nothing, lacks nothing, computes nothing."""

    def __init__(self, *, depth: int) -> None:
        self.info = _info()
        self.caps = Caps(
            array="opaque",
            dtypes=("float32", "bfloat16", "float16"),
            kv_dtypes=KV_DTYPES,
            depth=depth,
            shared_memory=True,
            features=frozenset(FEATURES),
        )

    def runner(self, config: RunnerConfig) -> Runner:
        """A NullRunner. Raises ConfigError if the option op_providers names anything."""
        from headrace.core.ops.table import read_wishes

        from .runner import NullRunner

        read_wishes(config.engine.device.op_providers, ())
        return NullRunner(config, self)

    def memory(self) -> Memory:
        """The machine's memory: a KV plan of the model's own size is checked against it."""
        return host_memory()

    def describe(self) -> Mapping[str, str]:
        """The run-ahead depth."""
        return {"depth": str(self.caps.depth)}


def _info() -> DeviceInfo:
    memory = host_memory()
    return DeviceInfo(
        id="null",
        name="no arithmetic",
        kind="accelerator",
        total_bytes=memory.total_bytes,
        free_bytes=memory.free_bytes,
    )
