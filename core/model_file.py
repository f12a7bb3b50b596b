"""Files of a checkpoint, which somebody else put there: absent, whole, or an error that says what is there."""

import os
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any

from .errors import ModelError
from .json_text import parse_json

LFS_POINTER = b"version https://git-lfs"
"""What Git LFS leaves in place of a file begins so."""
_POINTER_BYTES = 1024
_TEXT_SUFFIXES = (".json", ".txt", ".model", ".jinja")


def has_file(path: Path) -> bool:
    """Whether the file is there. Raises ModelError for what is there but is no file: a link that leads nowhere, a
    pointer of Git LFS, a folder, or a pipe, which would be waited for without end."""
    try:
        status = path.stat()
        is_pointer = S_ISREG(status.st_mode) and status.st_size < _POINTER_BYTES and _begins_as_pointer(path)
    except (FileNotFoundError, NotADirectoryError):
        if not path.is_symlink():
            return False
        raise ModelError(
            f"{path} is a link to {os.readlink(path)}, which is not there", remedies=("download the file again",)
        ) from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    if is_pointer:
        raise ModelError(f"{path} is a Git LFS pointer, not the file", remedies=("git lfs pull",))
    if not S_ISREG(status.st_mode):
        kind = "a folder" if S_ISDIR(status.st_mode) else "a device, a pipe or a socket"
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
        raise ModelError(
            f"{path} must hold a JSON {'list' if kind is list else 'object'}", remedies=("download the file again",)
        )
    return value


def _begins_as_pointer(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(LFS_POINTER)) == LFS_POINTER
