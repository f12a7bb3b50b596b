"""What sentence-transformers writes beside a model: how it pools, dense layers, lengths, prompts."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import ModelError
from ..model_file import has_file, read_json
from .config import HFConfig
from .spec import Activation, DenseSpec, ModelSpec, PoolerSpec, Pooling

MODULES_FILE = "modules.json"
_POOLING: Mapping[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
_OLD_POOLING = {
    "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean", "pooling_mode_lasttoken": "lasttoken",
}  # fmt: skip
_ACTIVATIONS: Mapping[str, Activation | None] = {
    "Identity": None, "Tanh": "tanh", "Sigmoid": "sigmoid", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SentencePrompts:
    """Texts that are put before a text, by name, and the name of the one that applies where none is given."""

    prompts: Mapping[str, str] = field(default_factory=dict)
    default: str = ""


def with_sentence_modules(spec: ModelSpec, folder: Path) -> ModelSpec:
    """The spec with the modules that modules.json lists; as it is if there is no such file, or it classifies.

    Dense layers are named by their folder, "2_Dense.linear", and stored in a file of their own there.
    Raises ModelError for a module that is not served.
    """
    is_classifier = spec.pooler is not None and spec.pooler.labels
    if is_classifier or not has_file(folder / MODULES_FILE):
        return spec
    pooler = PoolerSpec(kind="mean", max_tokens=_max_tokens(folder))
    size = spec.hidden_size
    for module in read_json(folder / MODULES_FILE, list):
        kind, path = _module(module, folder)
        match kind:
            case "Transformer":
                pass
            case "Pooling":
                pooler = dataclasses.replace(pooler, kind=_pooling(_config(path)))
            case "Dense":
                dense = _dense(_config(path), path.name, size)
                pooler, size = dataclasses.replace(pooler, dense=(*pooler.dense, dense)), dense.out_features
            case "Normalize":
                pooler = dataclasses.replace(pooler, normalize=True)
            case _:
                raise ModelError(
                    f"{folder / MODULES_FILE} lists a module {kind!r}; served are Transformer, Pooling, Dense and "
                    "Normalize"
                )
    return dataclasses.replace(spec, pooler=pooler)


def dense_folders(spec: ModelSpec) -> tuple[str, ...]:
    """Folders that hold the dense layers of sentence-transformers."""
    names = [dense.name for dense in spec.pooler.dense] if spec.pooler is not None else []
    return tuple(name.removesuffix(".linear") for name in names if name.endswith(".linear"))


def read_prompts(folder: Path | None) -> SentencePrompts:
    """The prompts of config_sentence_transformers.json. Raises ModelError."""
    if folder is None:
        return SentencePrompts()
    path = folder / "config_sentence_transformers.json"
    config = HFConfig(read_json(path), file=str(path))
    prompts = {str(name): str(text) for name, text in config.mapping("prompts").items()}
    default = config.get("default_prompt_name") or ""
    if default and default not in prompts:
        raise ModelError(f"{path} has default_prompt_name {default!r}, but only the prompts {', '.join(prompts)}")
    return SentencePrompts(prompts=prompts, default=default)


def _module(module: Any, folder: Path) -> tuple[str, Path]:
    if not isinstance(module, dict) or not isinstance(module.get("type"), str):
        raise ModelError(f"{folder / MODULES_FILE} must list objects with a type, got {module!r}")
    name = module.get("path") or ""
    parts = PurePosixPath(name).parts if isinstance(name, str) else ("", "")
    if len(parts) > 1 or ".." in parts or "/" in parts:
        raise ModelError(f"{folder / MODULES_FILE} must name folders beside it, got the path {name!r}")
    return module["type"].rpartition(".")[2], folder / name


def _config(path: Path) -> HFConfig:
    file = path / "config.json"
    if not has_file(file):
        raise ModelError(f"{file} is missing, and modules.json names its folder")
    return HFConfig(read_json(file), file=str(file))


def _pooling(config: HFConfig) -> Pooling:
    stated = config.get("pooling_mode")
    modes = [stated] if isinstance(stated, str) else list(stated or ())
    modes = modes or [mode for key, mode in _OLD_POOLING.items() if config.get(key)] or ["mean"]
    if len(modes) > 1 or modes[0] not in _POOLING:
        raise ModelError(f"{config.file} pools by {' and '.join(map(str, modes))}; served are {', '.join(_POOLING)}")
    if not config.boolean("include_prompt", True):
        raise ModelError(f"{config.file} leaves prompts out of the pooling, which is not served")
    return _POOLING[modes[0]]


def _dense(config: HFConfig, folder: str, size: int) -> DenseSpec:
    activation = str(config.get("activation_function") or "Tanh").rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise ModelError(f"{config.file} names the activation {activation!r}; known are {', '.join(_ACTIVATIONS)}")
    if config.size("in_features") != size:
        raise ModelError(f"{config.file} takes {config['in_features']} values, but the layer before gives {size}")
    if config.get("use_residual"):
        raise ModelError(f"{config.file} adds a residual, which is not served")
    return DenseSpec(
        name=f"{folder}.linear",
        in_features=size,
        out_features=config.size("out_features"),
        bias=config.boolean("bias", True),
        activation=_ACTIVATIONS[activation],
    )


def _max_tokens(folder: Path) -> int:
    """Where sentence-transformers cuts texts; 0 if it does not say."""
    path = folder / "sentence_bert_config.json"
    return HFConfig(read_json(path), file=str(path)).integer("max_seq_length", 0)
