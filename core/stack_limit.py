"""The stack that the system grants: what overruns it ends the process without a word."""

import resource

from .errors import ConfigError

_LEAST_BYTES = 2**20
"""Grammars and regular expressions that are nested deeply take more than a quarter of it."""


def check_stack() -> None:
    """Raise ConfigError if the stacks of this process's threads are so small that a request may overrun one."""
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    if soft != resource.RLIM_INFINITY and soft < _LEAST_BYTES:
        raise ConfigError(
            f"a stack may have {soft >> 10} KiB (ulimit -s), and {_LEAST_BYTES >> 10} are needed",
            remedies=["ulimit -s 8192"],
        )
