"""AMD GPUs as a platform. Only the manifest stands here; see device.py."""

from headrace.core.hooks import hookimpl
from headrace.core.platform import PlatformSpec


@hookimpl
def headrace_platforms() -> list[PlatformSpec]:
    """The rocm platform, which auto prefers to the processor."""
    return [
        PlatformSpec(
            name="rocm",
            impl="headrace.platforms.rocm.device:RocmPlatform",
            detect="headrace.platforms.rocm.detect:detect",
            priority=79,
            fix="install AMD's driver (amdgpu with kfd)",
            device_nodes=("/dev/kfd",),
        )
    ]
