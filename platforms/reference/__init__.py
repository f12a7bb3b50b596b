"""The definitions of the ops, and nothing else, as a platform: what every other one is compared with."""

from headrace.core.hooks import hookimpl
from headrace.core.platform import PlatformSpec


@hookimpl
def headrace_platforms() -> list[PlatformSpec]:
    """The reference platform; auto never takes it."""
    return [
        PlatformSpec(
            name="reference",
            impl="headrace.platforms.reference.device:ReferencePlatform",
            detect="headrace.platforms.reference.device:detect",
            priority=-1,
            fix="pip install 'headrace[torch]'",
            light_probe=True,
        )
    ]
