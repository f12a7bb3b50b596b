"""Intel GPUs as a platform. Only the manifest stands here; see device.py."""

from headrace.core.hooks import hookimpl
from headrace.core.platform import PlatformSpec


@hookimpl
def headrace_platforms() -> list[PlatformSpec]:
    """The xpu platform, which auto prefers to the processor."""
    return [
        PlatformSpec(
            name="xpu",
            impl="headrace.platforms.xpu.device:XpuPlatform",
            detect="headrace.platforms.xpu.detect:detect",
            priority=70,
            fix="install Intel's GPU driver",
            device_nodes=("/dev/dri/renderD*",),
        )
    ]
