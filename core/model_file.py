"""Files of a checkpoint, which somebody else put there: absent, whole, or an error that says what is there."""

import os
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any

from .errors import ModelError
from .json_text import parse_json

_TEXT_SUFFIXES = (".json", ".txt", ".model", ".jinja")


def has_file(path: Path) -> bool:
    """Whether the file is there. Raises ModelError for what is there but is no file: a link that leads nowhere, a
    folder, or a pipe, which would be waited for without end."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if not path.is_symlink():
            return False
        raise ModelError(
            f"{path} is a link to {os.readlink(path)}, which is not there", remedies=("download the file again",)
        ) from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    if not S_ISREG(mode):
        kind = "a folder" if S_ISDIR(mode) else "a device, a pipe or a socket"
        raise ModelError(f"{path} is {kind}, not a file", remedies=("download the file again",))
    return True


def check_folder(folder: Path) -> Path:
    """The folder, whose texts others than us may read (`has_file`). Raises ModelError."""
    for path in sorted(folder.iterdir()):
        if path.name.endswith(_TEXT_SUFFIXES):
            has_file(path)
    return folder


def read_json(path: Path, kind: type = dict) -> Any:
    """What a file holds, of this kind; empty if there is no file. Raises ModelError."""
    if not has_file(path):
        return kind()
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is damaged: {error}", remedies=("download the file again",)) from error
    if not isinstance(value, kind):
        raise ModelError(f"{path} must hold a JSON {'list' if kind is list else 'object'}")
    return value
