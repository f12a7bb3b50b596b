"""Intel Gaudi accelerators as a platform. Only the manifest stands here; see device.py."""

from headrace.core.hooks import hookimpl
from headrace.core.platform import PlatformSpec


@hookimpl
def headrace_platforms() -> list[PlatformSpec]:
    """The gaudi platform; its driver makes /dev/accel/accel0 and so on, older ones /dev/hl0."""
    return [
        PlatformSpec(
            name="gaudi",
            impl="headrace.platforms.gaudi.device:GaudiPlatform",
            detect="headrace.platforms.gaudi.detect:detect",
            priority=75,
            fix="install Intel's driver habanalabs; --device gaudi:emulated runs its code path here",
            device_nodes=("/dev/accel/accel[0-9]*", "/dev/hl[0-9]*"),
        )
    ]
