"""`python -m headrace` is `headrace`."""

from headrace.core.cli import main

main()
