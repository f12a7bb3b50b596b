"""Reads low-rank adapters as PEFT saves them: adapter_config.json beside adapter_model.safetensors."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import ModelError, ModelNotFound, WeightError
from ..model_file import has_file, read_json
from .dequantize import to_float32
from .open import open_weights
from .quantize import not_finite
from .source import DTYPE_BYTES, TensorInfo, WeightSource

CONFIG_FILE = "adapter_config.json"
_WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight")
_KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to begin an adapter that leave the weights under it as they are."""
_REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA, which scales whole weights",
    "lora_bias": "biases of its own",
    "modules_to_save": "whole modules beside its low-rank terms",
    "target_parameters": "terms of parameters that are no linear layers, such as stacked experts",
    "trainable_token_indices": "embeddings of tokens",
    "layer_replication": "layers that the model has not",
    "alora_invocation_tokens": "an invocation, before which tokens run without it",
    "use_qalora": "QALoRA, which pools its inputs",
}
"""Keys of the config that ask for more than B A x, and what they ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraModule:
    """What an adapter adds to one linear layer: scale * B A x."""

    a: TensorInfo  # [rank, in_features]
    b: TensorInfo  # [out_features, rank]
    scale: float

    @property
    def rank(self) -> int:
        """Rows of A."""
        return self.a.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraFiles:
    """An adapter whose index has been read and checked. modules: by the name that the layer's weight has in a
    checkpoint, such as model.layers.0.self_attn.q_proj.weight."""

    name: str
    file: Path
    config: Path
    modules: Mapping[str, LoraModule]

    def open(self) -> WeightSource:
        """The tensors; the caller closes it."""
        return open_weights(self.file, allow_pickle=True)  # read_lora asked whether that is allowed

    def digest(self) -> bytes:
        """16 bytes that name the content."""
        try:
            parts = [xxhash.xxh3_128_digest(path.read_bytes()) for path in (self.config, self.file)]
        except OSError as error:
            raise ModelError(f"{error.filename} cannot be read: {error.strerror}") from error
        return xxhash.xxh3_128_digest(b"".join(parts))


def read_lora(name: str, folder: Path, *, allow_pickle: bool = False) -> LoraFiles:
    """The adapter in a folder. Raises ModelError for what is missing, damaged, or asks for more than low-rank terms
    of linear layers."""
    if not folder.is_dir():
        raise ModelNotFound(f"adapter {name}: there is no folder {folder}", remedies=["--lora NAME=FOLDER"])
    config_file = folder / CONFIG_FILE
    if not has_file(config_file):
        raise ModelError(f"adapter {name}: {folder} has no {CONFIG_FILE}, so it is none that PEFT has saved")
    config = read_json(config_file)
    _check(config, config_file)
    file = next((folder / each for each in _WEIGHT_FILES if has_file(folder / each)), None)
    if file is None:
        raise ModelNotFound(f"adapter {name}: {folder} has no {_WEIGHT_FILES[0]}")
    source = open_weights(file, allow_pickle=allow_pickle)
    try:
        modules = _modules([source.info(each) for each in source.names()], config, config_file)
    finally:
        source.close()
    if not modules:
        raise WeightError(f"{file} holds no tensor", file=str(file))
    return LoraFiles(name=name, file=file, config=config_file, modules=modules)


def read_half(source: WeightSource, info: TensorInfo) -> npt.NDArray[np.float32]:
    """A or B. Raises WeightError for a NaN or an infinity."""
    values = to_float32(source.read(info.name))
    if not np.isfinite(values).all():
        raise not_finite(info.name, info.file)
    return values


def _check(config: Mapping[str, Any], file: Path) -> None:
    """Raise ModelError for a config that is none of LoRA's, or that asks for more."""
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        raise ModelError(f"{file}: peft_type {kind!r} is not served", remedies=["an adapter of peft_type LORA"])
    remedy = "merge the adapter into the model's weights (merge_and_unload in PEFT)"
    for key, what in _REFUSED.items():
        if config.get(key):
            raise ModelError(f"{file}: {key} asks for {what}, which is not served", remedies=[remedy])
    if (bias := config.get("bias", "none")) not in ("none", None):
        raise ModelError(f"{file}: bias {bias!r} changes biases, which is not served", remedies=[remedy])
    if (start := config.get("init_lora_weights", True)) not in _KEEPS_BASE:
        raise ModelError(
            f"{file}: init_lora_weights {start!r} means that the adapter belongs to changed weights of the model",
            remedies=["save it with path_initial_model_for_weight_conversion (PEFT)", remedy],
        )
    for key, kind in (("r", int), ("lora_alpha", (int, float))):
        if not isinstance(config.get(key), kind) or isinstance(config[key], bool) or not 0 < config[key] < math.inf:
            raise ModelError(f"{file}: {key} must be a positive number, got {config.get(key)!r}")
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(key) or {}
        if not isinstance(pattern, dict) or not all(
            isinstance(value, int | float) and 0 < value < math.inf for value in pattern.values()
        ):
            raise ModelError(f"{file}: {key} must map names of modules to positive numbers, got {pattern!r}")


def _modules(infos: Sequence[TensorInfo], config: Mapping[str, Any], file: Path) -> dict[str, LoraModule]:
    """Pairs of tensors by the weight that they add to. Raises WeightError for a tensor that is no half of any, a
    half without its other, or shapes that do not fit each other or the config."""
    halves: dict[str, dict[str, TensorInfo]] = {}
    for info in infos:
        match = _TENSOR.fullmatch(info.name)
        if match is None:
            raise _wrong(info, "is no lora_A.weight or lora_B.weight of a linear layer; nothing else is served")
        module, half = match["module"], match["half"]
        if (other := halves.setdefault(module, {}).get(half)) is not None:
            raise _wrong(info, f"stands there twice, as {other.name} too")
        if len(info.shape) != 2:
            raise _wrong(info, f"is {list(info.shape)}; halves of linear layers are matrices, others are not served")
            raise _wrong(info, f"is {list(info.shape)}; halves of linear layers are matrices, others are not served")
        if info.dtype not in DTYPE_BYTES or "float" not in info.dtype:
            raise _wrong(info, f"holds {info.dtype}, expected floating point")
        halves[module][half] = info
    return {f"{module}.weight": _pair(module, found, config, file) for module, found in halves.items()}


def _pair(module: str, found: Mapping[str, TensorInfo], config: Mapping[str, Any], file: Path) -> LoraModule:
    if len(found) == 1:
        [(half, info)] = found.items()
        raise _wrong(info, f"has no other half: there is no lora_{'B' if half == 'A' else 'A'} of {module}")
    a, b, rank = found["A"], found["B"], int(_by_pattern(config.get("rank_pattern"), module, config["r"]))
    if a.shape[0] != rank:
        raise _wrong(a, f"is {list(a.shape)}, expected {rank} rows, the rank that {file.name} says")
    if b.shape[1] != rank:
        raise _wrong(b, f"is {list(b.shape)}, expected {rank} columns, the rank that {file.name} says")
    alpha = float(_by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"]))
    return LoraModule(a=a, b=b, scale=alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _by_pattern(pattern: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The value of the first key that matches the end of the module's name, or all of it with ^, as in PEFT."""
    for key, value in (pattern or {}).items():
        try:
            if re.match(key if key.startswith("^") else rf"(.*\.)?({key})$", module):
                return value
        except re.error as error:
            raise ModelError(f"{key!r} of an adapter's pattern is no regular expression: {error}") from error
    return default


def _wrong(info: TensorInfo, what: str) -> WeightError:
    return WeightError(f"{info.file}: tensor {info.name} {what}", file=info.file, tensor=info.name)
