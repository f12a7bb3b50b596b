"""Finds the family that serves a config: one file in families/, by the name of its model_type or that of an alias."""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..errors import ModelError
from ..suggest import did_you_mean
from ..weights.decoded import check_quantization
from ..weights.names import NameTable
from . import families
from .aliases import ALIASES
from .config import HFConfig
from .dense_families import DENSE_FAMILIES
from .encoder_families import ENCODER_FAMILIES
from .gemma_families import GEMMA_FAMILIES
from .gpt_families import GPT_FAMILIES
from .hybrid_families import HYBRID_FAMILIES
from .latent_families import LATENT_FAMILIES
from .mixture_families import MIXTURE_FAMILIES
from .recipes import Recipe
from .spec import ModelSpec
from .vision_families import SEES_AHEAD, add_images, reads_images, vision_names
from .wrappers import WRAPPERS, text_config, text_names

RECIPES: Mapping[str, Recipe] = {
    **DENSE_FAMILIES,
    **ENCODER_FAMILIES,
    **GEMMA_FAMILIES,
    **GPT_FAMILIES,
    **HYBRID_FAMILIES,
    **LATENT_FAMILIES,
    **MIXTURE_FAMILIES,
}
"""Families that are entries of tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What serves a model_type. weights: how its checkpoints spell the parameters."""

    name: str
    translate: Callable[[HFConfig], ModelSpec]
    weights: NameTable

    def to_spec(self, config: HFConfig) -> ModelSpec:
        """The model that a config describes. Raises ModelError for what this family cannot serve."""
        if quantization := config.quantization():
            check_quantization(quantization, config.file)
        return self.translate(config)


def family_names() -> tuple[str, ...]:
    """Every model_type that is served, sorted; those of models with more inputs than text are in WRAPPERS."""
    files = (module.name for module in pkgutil.iter_modules(families.__path__))
    named = {name for name in files if not name.startswith("_")}
    return tuple(sorted(named | RECIPES.keys() | ALIASES.keys()))


@functools.cache
def find_family(model_type: str) -> Family:
    """The family of a model_type. Raises ModelError that lists near names and all families."""
    name = model_type.replace("-", "_")
    if name not in family_names():
        raise unknown_family(model_type)
    if name in ALIASES:
        like, defaults = ALIASES[name]
        family = find_family(like)
        return Family(
            name=name,
            translate=lambda config: family.translate(config.with_defaults(**defaults)),
            weights=family.weights,
        )
    if name in RECIPES:
        recipe = RECIPES[name]
        return Family(name=name, translate=recipe.to_spec, weights=recipe.names())
    module = importlib.import_module(f"{families.__name__}.{name}")
    return Family(name=name, translate=module.to_spec, weights=module.WEIGHTS)


def family_of(config: HFConfig, *, with_images: bool = True) -> Family:
    """The family that serves a config, for a model with more inputs than text that of the language model inside, with
    what reads images if that is known and wanted. Raises ModelError."""
    outer = config.model_type.replace("-", "_")
    if outer not in WRAPPERS:
        return find_family(config.model_type)
    family = find_family(text_config(config).model_type)
    if not (with_images and reads_images(config)):
        if config.model_type in SEES_AHEAD:
            raise ModelError(f"{config.file}: {config.model_type} is served on devices that read images")
        return Family(
            name=family.name,
            translate=lambda config: family.to_spec(text_config(config)),
            weights=text_names(family.weights, outer),
        )
    return Family(
        name=family.name,
        translate=lambda config: add_images(config, family.to_spec(_causal(config))),
        weights=vision_names(config, text_names(family.weights)),
    )


def is_foreign(config: HFConfig) -> bool:
    """True if the model is of no family, and none that is known has one of a family inside."""
    name = config.model_type.replace("-", "_")
    return name not in family_names() and name not in WRAPPERS and not config.get("text_config")


def unknown_family(model_type: str, why: str = "") -> ModelError:
    """The error for a model_type without a file, and why nothing else serves it either."""
    known = family_names()
    meant = did_you_mean(model_type.replace("-", "_"), [*known, *WRAPPERS])
    return ModelError(
        f"model_type {model_type!r} is not served{meant}" + (f"; {why}" if why else ""),
        remedies=[f"take a model of one of these types: {', '.join(known)}"],
    )


def _causal(config: HFConfig) -> HFConfig:
    """The language model's config; what it sees ahead is told by VisionSpec.sight."""
    inner = text_config(config)
    return inner.replace(use_bidirectional_attention=None) if config.model_type in SEES_AHEAD else inner


def read_spec(config: HFConfig, *, with_images: bool = True) -> ModelSpec:
    """The spec of a config by its family; see family_of. Raises ModelError."""
    return family_of(config, with_images=with_images).to_spec(config)
