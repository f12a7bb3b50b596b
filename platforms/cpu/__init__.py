"""The processor of this machine as a platform. Only the manifest stands here; see device.py."""

from headrace.core.hooks import hookimpl
from headrace.core.platform import PlatformSpec


@hookimpl
def headrace_platforms() -> list[PlatformSpec]:
    """The cpu platform: there on every machine, so auto takes it when nothing better is usable."""
    return [
        PlatformSpec(
            name="cpu",
            impl="headrace.platforms.cpu.device:CpuPlatform",
            detect="headrace.platforms.cpu.detect:detect",
            priority=10,
            fix="pip install 'headrace[torch]'",
            light_probe=True,
        )
    ]
