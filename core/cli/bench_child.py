"""headrace as a child process with a given configuration: what benchmarks start and time."""

import os
import sys

from ..config import EngineConfig, all_options
from ..settings import text_of, variable_of

PROGRAM = (sys.executable, "-c", "from headrace.core.cli import main; main()")
"""The start of a command line of this installation."""


def child_environment(config: EngineConfig) -> dict[str, str]:
    """This process's environment with every option of the configuration as its variable."""
    environment = dict(os.environ)
    for name, (group, _) in all_options().items():
        text = text_of(getattr(getattr(config, group), name))
        environment.pop(variable_of(name), None)
        if text:
            environment[variable_of(name)] = text
    return environment
