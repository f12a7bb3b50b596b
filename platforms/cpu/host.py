"""The processor under torch: for the reference platform, and for models that have no native program."""

from collections.abc import Mapping, Sequence

import torch

from headrace.core.config import KV_DTYPES
from headrace.core.models.needs import FEATURES
from headrace.core.platform import Caps, DeviceInfo, Memory
from headrace.core.runner.torch import TorchDevice

from .memory import host_memory


class HostDevice(TorchDevice):
    """All ops have their definitions here, so it lacks nothing that a model needs."""

    def __init__(self, *, info: DeviceInfo, dtypes: tuple[str, ...], threads: int, ranks: Sequence[str] = ()) -> None:
        self.ranks = ranks
        caps = Caps(dtypes=dtypes, kv_dtypes=KV_DTYPES, shared_memory=True, features=frozenset(FEATURES))
        super().__init__(info=info, caps=caps, torch_device="cpu")
        self.threads = threads
        torch.set_num_threads(threads)

    def memory(self) -> Memory:
        """The machine's memory within the cgroup's limit."""
        return host_memory()

    def describe(self) -> Mapping[str, str]:
        """Threads, and that nothing here is fast."""
        return {"threads": str(self.threads), "ops": "torch"}
