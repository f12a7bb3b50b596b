"""The reference device: definitions only, in every dtype that torch computes in."""

import dataclasses
from collections.abc import Sequence

from headrace.core.config import EngineConfig
from headrace.core.platform import Device, Platform, Probe

from ..cpu.detect import detect as detect_cpu


def detect() -> Probe:
    """The processor under the name of this platform, usable if torch is installed."""
    probe = detect_cpu()
    devices = tuple(dataclasses.replace(info, id="reference") for info in probe.devices)
    return dataclasses.replace(probe, devices=devices)


class ReferencePlatform(Platform):
    """Opens the definitions on the processor. float64 serves as the oracle of the other dtypes."""

    def open(self, ids: Sequence[str], config: EngineConfig) -> Device:
        """Open it. Raises DeviceUnavailable for any id."""
        from ..cpu.device import open_host

        return open_host("reference", ids, config, dtypes=("float32", "bfloat16", "float16", "float64"))
