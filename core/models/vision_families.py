"""Vision-language models as data: how each model_type turns images into rows for the language model inside it."""

import dataclasses
from collections.abc import Mapping

from ..errors import ModelError
from ..weights.names import NameTable
from .config import HFConfig
from .spec import ModelSpec
from .vision_like import RENAMES, UNREAD, VisionFamily, turn_by_axes, with_vision
from .vision_mllama import MLLAMA
from .vision_qwen import QWEN_FAMILIES
from .vision_vit import VIT_FAMILIES


def reads_images(config: HFConfig) -> bool:
    """True if the images of this model are known, not its language model alone."""
    family = VISION_FAMILIES.get(config.model_type)
    kind = _encoder_type(config)
    return family is not None and (not family.encoders or not kind or kind in family.encoders)


def add_images(config: HFConfig, spec: ModelSpec) -> ModelSpec:
    """The language model's spec with what reads images. Raises ModelError."""
    family = _family(config)
    if family.interleaves is not None:
        spec = turn_by_axes(config, spec, family.interleaves)
    try:
        return with_vision(family.language(spec), family.read(config, spec))
    except ModelError as error:
        alone = [] if config.model_type in SEES_AHEAD else ["HEADRACE_IMAGES=0, which loads the language model alone"]
        raise ModelError(error.reason, remedies=[*error.remedies, *alone]) from None


def vision_names(config: HFConfig, names: NameTable) -> NameTable:
    """The language model's table with the names of what reads images."""
    family = _family(config)
    return dataclasses.replace(
        names,
        entries={**names.entries, **family.entries},
        renames=(*RENAMES, *names.renames),
        ignore=(*names.ignore, *UNREAD, *family.unread),
    )


def _family(config: HFConfig) -> VisionFamily:
    kind = f"{config.model_type}/{_encoder_type(config)}"
    return VISION_FAMILIES.get(kind) or VISION_FAMILIES[config.model_type]


def _encoder_type(config: HFConfig) -> str:
    return str(config.mapping("vision_config").get("model_type", ""))


VISION_FAMILIES: Mapping[str, VisionFamily] = {**VIT_FAMILIES, **QWEN_FAMILIES, "mllama": MLLAMA}
SEES_AHEAD = frozenset({"paligemma"})
"""Types whose prompts see ahead, with images or without."""
