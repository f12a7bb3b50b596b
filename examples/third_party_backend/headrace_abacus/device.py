"""What headrace asks of the platform: is there a device, what can it do, which ops does it do better."""

from headrace.core.errors import DeviceUnavailable
from headrace.core.models.needs import FEATURES
from headrace.core.platform import Caps, DeviceInfo, Memory, OpProvider, Platform, Probe, Status
from headrace.core.runner.torch import TorchDevice

SIZE = 4 << 30
INFO = DeviceInfo(id="abacus:0", name="Abacus One", kind="accelerator", total_bytes=SIZE, free_bytes=SIZE)


def detect():
    """Runs in a child process with a time limit: ask the driver here."""
    return Probe(status=Status.OK, devices=(INFO,))


class AbacusPlatform(Platform):
    """Opens the device in the process that will use it."""

    def open(self, ids, config):
        """--device abacus or abacus:0."""
        if list(ids) not in ([], ["0"]):
            raise DeviceUnavailable(f"there is one abacus, 0; got {','.join(ids)}", remedies=["--device abacus"])
        return AbacusDevice()


class AbacusDevice(TorchDevice):
    """The stock runner on the vendor's torch device, with one kernel of the vendor's."""

    def __init__(self):
        from . import driver  # adds the device type to torch

        caps = Caps(dtypes=("float32", "bfloat16", "float16"), shared_memory=True, features=frozenset(FEATURES))
        super().__init__(info=INFO, caps=caps, torch_device="abacus:0")
        self.driver = driver

    def providers(self):
        """Ops with a kernel; the definitions serve all others on the device."""
        return [OpProvider(name="abacus", ops={"rms_norm": self.driver.rms_norm})]

    def memory(self):
        """Bytes by the driver's count."""
        used = self.driver.used_bytes()
        return Memory(total_bytes=SIZE, free_bytes=SIZE - used, used_bytes=used)
