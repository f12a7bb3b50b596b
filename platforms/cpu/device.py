"""The opened processor: threads, dtypes and memory for the stock torch runner."""

from collections.abc import Mapping, Sequence

import torch

from headrace.core.config import EngineConfig
from headrace.core.errors import DeviceUnavailable
from headrace.core.models.needs import FEATURES
from headrace.core.platform import Caps, Device, DeviceInfo, Memory, Platform
from headrace.core.runner.torch import TorchDevice
from headrace.core.units import format_bytes

from .detect import cpu_info, has_native_bfloat16, usable_threads
from .memory import host_memory, memory_limit


class HostDevice(TorchDevice):
    """The processor under torch. All ops have their definitions there, so it lacks nothing that a model needs."""

    def __init__(self, *, info: DeviceInfo, dtypes: tuple[str, ...], threads: int) -> None:
        caps = Caps(dtypes=dtypes, shared_memory=True, features=frozenset(FEATURES))
        super().__init__(info=info, caps=caps, torch_device="cpu")
        self.threads = threads

    def memory(self) -> Memory:
        """The machine's memory within the cgroup's limit."""
        return host_memory()

    def describe(self) -> Mapping[str, str]:
        """Instruction set, threads, and the cgroup's memory limit if there is one."""
        limit = memory_limit()
        return {
            "isa": self.info.arch,
            "threads": str(self.threads),
            **({"memory limit": format_bytes(limit)} if limit is not None else {}),
        }


class CpuPlatform(Platform):
    """Opens the one processor."""

    def open(self, ids: Sequence[str], config: EngineConfig) -> Device:
        """Open it; `--threads` sets the threads of this process. Raises DeviceUnavailable for any id."""
        narrow = ("bfloat16", "float32") if has_native_bfloat16() else ("float32", "bfloat16")
        return open_host("cpu", ids, config, dtypes=(*narrow, "float16"))


def open_host(name: str, ids: Sequence[str], config: EngineConfig, *, dtypes: tuple[str, ...]) -> HostDevice:
    """The processor as the device `name`, with the number of threads that the configuration asks for."""
    if ids:
        raise DeviceUnavailable(
            f"device {name} takes no ids, got {','.join(ids)}", remedies=[f"--device {name}", "--threads 4"]
        )
    threads = usable_threads() if config.device.threads == "auto" else config.device.threads
    torch.set_num_threads(threads)
    return HostDevice(info=cpu_info(id=name), dtypes=dtypes, threads=threads)
