"""A platform without arithmetic: it measures our own overhead and checks that every block is the right one."""

from headrace.core.hooks import hookimpl
from headrace.core.platform import PlatformSpec


@hookimpl
def headrace_platforms() -> list[PlatformSpec]:
    """The null platform; auto never takes it."""
    return [
        PlatformSpec(
            name="null",
            impl="headrace.platforms.null.device:NullPlatform",
            detect="headrace.platforms.null.device:detect",
            priority=-2,
            light_probe=True,
        )
    ]
