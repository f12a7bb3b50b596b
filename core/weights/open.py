"""Finds the weights of a folder or file and opens them with the reader of their format."""

from pathlib import Path

from ..errors import ModelNotFound, WeightError
from ..model_file import has_file
from .gguf import GGUFSource
from .pickle import PickleSource
from .safetensors import SafetensorsSource
from .source import WeightSource

_FOLDER_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""What a model folder is searched for, in transformers' order."""
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth")


def open_weights(path: Path, *, allow_pickle: bool = False) -> WeightSource:
    """The checkpoint at `path`: a folder with safetensors (else .bin) files, or a .gguf, .safetensors or .bin file.

    Raises ModelNotFound if there is no such path, WeightError if it holds no weights or damaged ones.
    """
    file = _find_in_folder(path) if path.is_dir() else path
    if not has_file(file):
        raise ModelNotFound(f"there is no file or folder {path}")
    if file.name.endswith((".safetensors", ".safetensors.index.json")):
        return SafetensorsSource(file)
    if file.name.endswith((*_PICKLE_SUFFIXES, ".bin.index.json")):
        return PickleSource(file, allow_pickle=allow_pickle)
    if file.suffix == ".gguf" or _begins_with(file, b"GGUF"):
        return GGUFSource(file)
    raise WeightError(
        f"{file} is of no known weight format; known endings: .gguf, .safetensors, {', '.join(_PICKLE_SUFFIXES)}",
        file=str(file),
    )


def _find_in_folder(folder: Path) -> Path:
    for name in _FOLDER_FILES:
        if has_file(folder / name):
            return folder / name
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return others[0]
    if others:
        raise WeightError(
            f"{folder} holds {len(others)} .safetensors files ({_listed(others)}) but neither "
            "model.safetensors nor model.safetensors.index.json, so their order and number are unknown",
            file=str(folder),
            remedies=("add the model's model.safetensors.index.json", "pass one of the files"),
        )
    reason = f"{folder} holds no weights; looked for {', '.join(_FOLDER_FILES)} and *.safetensors"
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        raise WeightError(
            f"{reason}. It holds GGUF files, which are passed by name: {_listed(ggufs)}",
            file=str(folder),
            remedies=(str(ggufs[0]),),
        )
    raise WeightError(reason, file=str(folder))


def _listed(paths: list[Path]) -> str:
    return ", ".join(path.name for path in paths[:5]) + (", ..." if len(paths) > 5 else "")


def _begins_with(path: Path, magic: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(magic)) == magic
    except OSError as error:
        raise WeightError(f"{path}: cannot be opened: {error.strerror or error}", file=str(path)) from error
