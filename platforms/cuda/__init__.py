"""NVIDIA GPUs as a platform. Only the manifest stands here; see device.py."""

from headrace.core.hooks import hookimpl
from headrace.core.platform import PlatformSpec


@hookimpl
def headrace_platforms() -> list[PlatformSpec]:
    """The cuda platform, which auto prefers to the processor."""
    return [
        PlatformSpec(
            name="cuda",
            impl="headrace.platforms.cuda.device:CudaPlatform",
            detect="headrace.platforms.cuda.detect:detect",
            priority=80,
            fix="install NVIDIA's driver",
            device_nodes=("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/nvmap"),
        )
    ]
