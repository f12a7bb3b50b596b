"""Reads PyTorch's pickle checkpoints (.bin, .pt), and only if the user allows it: a pickle can run any code."""

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import WeightError
from .safetensors import read_weight_map
from .source import DTYPE_BYTES, HostTensor, TensorInfo, numpy_dtype

if TYPE_CHECKING:
    import torch


class PickleSource:
    """A WeightSource over one state dict file, or a .bin.index.json beside its shards.

    Files are loaded with weights_only, so that torch accepts tensors and plain containers alone, and mapped where
    their format permits (it does since torch 1.6).
    """

    def __init__(self, path: Path, *, allow_pickle: bool) -> None:
        """Raises WeightError if pickles are not allowed, torch is missing, or a file is not a plain state dict."""
        if not allow_pickle:
            raise WeightError(
                f"{path} is a pickle file; a pickle can run any code when it is loaded, so it is refused",
                file=str(path),
                remedies=(
                    "use a safetensors version of the model",
                    "--allow-pickle if you trust where the file comes from",
                ),
            )
        self._tensors: dict[str, torch.Tensor] = {}
        self._infos: dict[str, TensorInfo] = {}
        if path.name.endswith(".json"):
            weight_map = read_weight_map(path)
            for shard in sorted(set(weight_map.values())):
                self._add_file(path.parent / shard)
            for name, shard in weight_map.items():
                info = self._infos.get(name)
                if info is None or info.file != str(path.parent / shard):
                    raise _error(path.parent / shard, f"is missing, though {path.name} lists it there", name)
        else:
            self._add_file(path)

    def names(self) -> Sequence[str]:
        """Names in the order of the state dicts."""
        return tuple(self._infos)

    def info(self, name: str) -> TensorInfo:
        """Index entry of one tensor. KeyError if there is none."""
        return self._infos[name]

    def read(self, name: str) -> HostTensor:
        """One tensor; it shares memory with the mapping."""
        import torch

        info = self._infos[name]
        tensor = self._tensors[name].detach().contiguous()
        if info.dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
            tensor = tensor.view(torch.int16 if info.dtype == "bfloat16" else torch.uint8)
        data: np.ndarray[Any, Any] = tensor.numpy().view(numpy_dtype(info.dtype))
        return HostTensor(name=name, dtype=info.dtype, shape=info.shape, data=data, file=info.file)

    def close(self) -> None:
        """Drop the tensors; mappings go with the last of them."""
        self._tensors = {}

    def _add_file(self, path: Path) -> None:
        content = _load(path)
        import torch

        for name, tensor in content.items():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise _error(path, f"is not a flat state dict: {name!r} is a {type(tensor).__name__}")
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype not in DTYPE_BYTES or tensor.layout is not torch.strided or tensor.device.type != "cpu":
                raise _error(path, f"is a {tensor.layout} tensor of {dtype}; dense ones of {_DTYPES} are read", name)
            if name in self._infos:
                raise _error(path, f"is a duplicate: {Path(self._infos[name].file).name} has it too", name)
            self._tensors[name] = tensor
            self._infos[name] = TensorInfo(
                name=name,
                dtype=dtype,
                shape=tuple(tensor.shape),
                file=str(path),
                num_bytes=tensor.numel() * tensor.element_size(),
            )


_DTYPES = ", ".join(DTYPE_BYTES)


def _load(path: Path) -> dict[Any, Any]:
    try:
        import torch
    except ModuleNotFoundError as error:
        raise WeightError(
            f"{path} is a pickle file, which needs torch to be read, and torch is not installed",
            file=str(path),
            remedies=("pip install 'headrace[torch]'", "use a safetensors version of the model"),
        ) from error
    try:
        is_zip = zipfile.is_zipfile(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:
        # A damaged pickle can fail in any way at all; all of them mean the same to the user.
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise _error(path, f"cannot be loaded: {first_line}") from error
    if not isinstance(content, dict):
        raise _error(path, f"is not a state dict but a {type(content).__name__}")
    return content


def _error(path: Path, what: str, tensor: str = "") -> WeightError:
    subject = f"{path}: tensor {tensor} " if tensor else f"{path}: "
    return WeightError(subject + what, file=str(path), tensor=tensor)
