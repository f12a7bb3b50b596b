"""Results on stdout: JSON objects and tables."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError


def print_json(value: Any) -> None:
    """One JSON value, indented. Plain ASCII if stdout can take nothing else."""
    is_utf8 = sys.stdout.encoding.lower().replace("-", "") == "utf8"
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=not is_utf8, default=str) + "\n")


def check_writable(path: Path) -> None:
    """Raise ConfigError for a file that cannot be written, before what it is for has taken its time."""
    try:
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def write_json(path: Path, value: Any) -> None:
    """The same as a file. Raises ConfigError."""
    try:
        path.write_text(json.dumps(value, indent=2, default=str) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[str] = ()) -> None:
    """A table; the columns named in `numbers` are right-aligned. Never cut off when stdout is not a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 240, highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
