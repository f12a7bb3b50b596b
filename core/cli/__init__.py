"""The command line: parsing, tables and messages; everything it does is a call into the library."""

import sys


def main() -> None:
    """The `headrace` program: run the command line and leave with its exit code."""
    # Ctrl-C may come while modules are still being imported, so nothing is imported outside the try.
    try:
        from .exits import leave, run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        import os

        os._exit(130)
    leave(code)
