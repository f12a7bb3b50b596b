"""Results on stdout: JSON objects and tables."""

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from ..cache import new_file
from ..errors import CapacityError, ConfigError

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_CONTROLS[ord("\r")] = ""


def visible(text: str) -> str:
    """Text from elsewhere without what a terminal would obey: escape sequences are spelled out."""
    return text.translate(_CONTROLS)


def write_text(text: str) -> None:
    """Write a piece of a model's text to stdout now: as it is, or `visible` on a terminal."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


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


@contextmanager
def output_file(path: Path) -> Iterator[Path]:
    """A file to write to, which becomes `path` when the block ends: a failure leaves what was there. What is no plain
    file is written to directly. Raises CapacityError for a full disk, else ConfigError."""
    target = Path(os.path.realpath(path))
    is_plain = (target.is_file() or not target.exists()) and not path.is_relative_to("/dev")
    is_apart = is_plain and os.access(target.parent, os.W_OK)
    try:
        with new_file(target) if is_apart else nullcontext(target) as part:
            yield part
            if is_apart and target.exists():
                shutil.copymode(target, part)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError(
                f"no space left to write {path}", remedies=["another disk", "free some space"]
            ) from None
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


@contextmanager
def saved(
    result: Mapping[str, Any],
    output: str | None,
    png: str | None = None,
    draw: Callable[[Mapping[str, Any], Path], None] | None = None,
) -> Iterator[None]:
    """Show a result in the block. Then it is written to the file `output` as JSON, and drawn to `png`, where these
    are given: what cannot be written has been shown. Raises what `output_file` does."""
    try:
        yield
    finally:
        with ExitStack() as files:
            if png and draw is not None:
                files.callback(draw, result, Path(png))
            if output:
                with output_file(Path(output)) as file:
                    file.write_text(json.dumps(result, indent=2, default=str) + "\n", encoding="utf-8")


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
