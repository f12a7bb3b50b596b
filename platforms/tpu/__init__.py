"""Google TPUs as a platform, driven by JAX. Only the manifest stands here; see device.py."""

from headrace.core.hooks import hookimpl
from headrace.core.platform import PlatformSpec


@hookimpl
def headrace_platforms() -> list[PlatformSpec]:
    """The tpu platform. Its chips appear as /dev/accel* or, on newer hosts, as VFIO groups."""
    return [
        PlatformSpec(
            name="tpu",
            impl="headrace.platforms.tpu.device:TpuPlatform",
            detect="headrace.platforms.tpu.detect:detect",
            priority=90,
            fix="pip install 'headrace[tpu]' on a TPU host; --device tpu:emulated runs its code path here",
            device_nodes=("/dev/accel*", "/dev/vfio/[0-9]*"),
        )
    ]
