"""The conformance kit as a plugin: it tells whether a device computes what the definitions say."""

from collections.abc import Callable, Sequence

from headrace.core.conformance import Check
from headrace.core.hooks import hookimpl


@hookimpl
def headrace_conformance(device: str, select: str, report: Callable[[str], None]) -> Sequence[Check]:
    """Run the kit's checks whose names contain `select` on `device`."""
    from .kit import run

    return run(device, select, report)
