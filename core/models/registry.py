"""Finds the family that serves a model_type: one file in families/, found by its name."""

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import ModelError
from ..suggest import did_you_mean
from ..weights.names import NameTable
from . import families
from .config import HFConfig
from .spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One file of families/. name: its model_type; weights: how its checkpoints spell the parameters."""

    name: str
    translate: Callable[[HFConfig], ModelSpec]
    weights: NameTable

    def to_spec(self, config: HFConfig) -> ModelSpec:
        """The model that a config describes. Raises ModelError for what this family cannot serve."""
        quantization = config.get("quantization_config") or config.get("compression_config")
        if quantization:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise ModelError(
                f"{config.file} describes weights quantized by {method!r}; only plain and GGUF weights are read",
                remedies=["take the unquantized model", "take a .gguf file of the model"],
            )
        return self.translate(config)


def family_names() -> tuple[str, ...]:
    """Every model_type that is served, sorted."""
    names = (module.name for module in pkgutil.iter_modules(families.__path__))
    return tuple(sorted(name for name in names if not name.startswith("_")))


@functools.cache
def find_family(model_type: str) -> Family:
    """The family of a model_type. Raises ModelError that lists near names and all families."""
    name = model_type.replace("-", "_")
    known = family_names()
    if name not in known:
        raise ModelError(
            f"model_type {model_type!r} is not served{did_you_mean(name, known)}",
            remedies=[f"take a model of one of these types: {', '.join(known)}"],
        )
    module = importlib.import_module(f"{families.__name__}.{name}")
    return Family(name=name, translate=module.to_spec, weights=module.WEIGHTS)


def read_spec(config: HFConfig) -> ModelSpec:
    """The spec of a config by the family that its model_type names. Raises ModelError."""
    if config.get("text_config") and config.model_type not in family_names():
        raise ModelError(
            f"{config.file} describes a {config.model_type!r} model with more inputs than text; "
            "the language model inside it (text_config) cannot be taken out yet"
        )
    return find_family(config.model_type).to_spec(config)
