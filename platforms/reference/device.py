"""The reference device: definitions only, in every dtype that torch computes in."""

import dataclasses
from collections.abc import Sequence
from importlib.util import find_spec

from headrace.core.config import EngineConfig
from headrace.core.devices import AUTO
from headrace.core.platform import Device, Platform, Probe, Status

from ..cpu.detect import cpu_info


def detect() -> Probe:
    """The processor under the name of this platform, usable if torch is installed."""
    info = dataclasses.replace(cpu_info(), id="reference")
    if find_spec("torch") is None:
        return Probe(
            status=Status.MISSING,
            reason="the package torch is not installed",
            fix="pip install 'headrace[torch]'",
            devices=(info,),
        )
    return Probe(status=Status.OK, devices=(info,))


class ReferencePlatform(Platform):
    """Opens the definitions on the processor. float64 serves as the oracle of the other dtypes."""

    def open(self, ids: Sequence[str], config: EngineConfig) -> Device:
        """Open it. Raises DeviceUnavailable for any id."""
        from ..cpu.device import check_no_ids, choose_threads
        from ..cpu.host import HostDevice

        check_no_ids("reference", ids)
        size = config.device.tensor_parallel_size
        num_ranks = 1 if size == AUTO else size
        return HostDevice(
            info=cpu_info(id="reference"),
            dtypes=("float32", "bfloat16", "float16", "float64"),
            threads=max(1, choose_threads(config) // num_ranks),
            ranks=("reference",) * num_ranks if num_ranks > 1 else (),
        )
