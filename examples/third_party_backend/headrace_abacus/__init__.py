"""The abacus accelerator as a platform of headrace: its manifest, which imports nothing of the vendor's."""

from headrace.core.hooks import hookimpl
from headrace.core.platform import PlatformSpec


@hookimpl
def headrace_platforms():
    """One platform. auto never takes it (priority below 0), because the device only pretends."""
    return [
        PlatformSpec(
            name="abacus",
            impl="headrace_abacus.device:AbacusPlatform",
            detect="headrace_abacus.device:detect",
            api=(1, 0),
            priority=-1,
            fix="pip install headrace-abacus",
        )
    ]
