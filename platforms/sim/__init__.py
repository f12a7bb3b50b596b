"""A strict accelerator in Python, for tests: its numbers are right, and it is severe with whoever uses it wrongly."""

from headrace.core.hooks import hookimpl
from headrace.core.platform import PlatformSpec


@hookimpl
def headrace_platforms() -> list[PlatformSpec]:
    """The sim platform; auto never takes it."""
    return [
        PlatformSpec(
            name="sim",
            impl="headrace.platforms.sim.device:SimPlatform",
            detect="headrace.platforms.sim.detect:detect",
            priority=-3,
            fix="pip install 'headrace[torch]'",
            light_probe=True,
        )
    ]
