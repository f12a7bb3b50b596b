"""The simulated device: the stock runner on tensors that refuse to be mixed with the host's."""

from collections.abc import Mapping, Sequence

from headrace.core.config import KV_DTYPES, EngineConfig
from headrace.core.devices import AUTO
from headrace.core.errors import DeviceUnavailable
from headrace.core.models.needs import FEATURES
from headrace.core.platform import Caps, Device, Memory, OpProvider, Platform, Status
from headrace.core.runner.torch import TorchDevice

from ..cpu.memory import host_memory
from ..static.ops import static_provider
from .detect import detect, sim_info


class SimPlatform(Platform):
    """Opens the one simulated device."""

    def open(self, ids: Sequence[str], config: EngineConfig) -> Device:
        """Open it. Raises DeviceUnavailable for an id other than 0 or emulated, or if torch cannot."""
        if list(ids) not in ([], ["0"], ["emulated"]):
            raise DeviceUnavailable(f"device sim has one device, 0; got {','.join(ids)}", remedies=["--device sim"])
        probe = detect()
        if probe.status != Status.OK:
            raise DeviceUnavailable(f"device sim cannot be used: {probe.reason}", remedies=[probe.fix])
        size = config.device.tensor_parallel_size
        return SimDevice(ranks=() if size in (AUTO, 1) else ("sim",) * int(size))


class SimDevice(TorchDevice):
    """Real numbers in host memory behind a device of its own."""

    def __init__(self, ranks: Sequence[str] = ()) -> None:
        from . import tensor

        self.ranks = ranks
        self._counts = tensor.COUNTS
        features = frozenset(FEATURES) - {"foreign_code"}  # it reads values on the host
        dtypes = ("float32", "bfloat16", "float16")
        caps = Caps(dtypes=dtypes, kv_dtypes=KV_DTYPES, shared_memory=True, features=features)
        super().__init__(info=sim_info(), caps=caps, torch_device=f"{tensor.NAME}:0")

    def memory(self) -> Memory:
        """The machine's memory."""
        return host_memory()

    def providers(self) -> Sequence[OpProvider]:
        """Ops that read no value on the host; the definitions serve everything else."""
        return (static_provider(),)

    def describe(self) -> Mapping[str, str]:
        """What has been counted so far."""
        counts = self._counts
        return {
            "copies_in": str(counts.copies_in),
            "copies_out": str(counts.copies_out),
            "host_syncs": str(counts.host_syncs),
        }
