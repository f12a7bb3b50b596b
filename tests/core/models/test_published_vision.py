"""What published models that read images are made of, against transformers' classes, and their layout of patches."""

import re
from typing import Any

import numpy as np
import pytest

from headrace.core.errors import ModelError
from headrace.core.models.config import HFConfig
from headrace.core.models.declare import declare_params
from headrace.core.models.registry import family_of, read_spec
from headrace.core.runner.images import _bucket
from published_vision import PUBLISHED_VISION

LLAVA = PUBLISHED_VISION["llava_1_5_7b"]
UNREAD = {
    "llava": r"vision_tower.*(layers\.23\.|post_layernorm)",
    "llava_next": r"vision_tower.*(layers\.23\.|post_layernorm)",
    "pixtral_12b": "$^",
    "internvl": r"\.lambda_[12]$",
    "llava_onevision": r"vision_tower.*post_layernorm",
    "aya_vision": r"vision_tower.*post_layernorm",
    "mllama": r"\bgate$|_gate$|\.gate_(attn|ffn)$",
}
"""Behind the layer whose patches are read, and factors that become part of the weights that they multiply."""


@pytest.mark.parametrize("name", PUBLISHED_VISION)
def test_declared_parameters_are_as_many_as_those_of_transformers(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    raw = PUBLISHED_VISION[name]
    auto: Any = AutoModelForImageTextToText
    with torch.device("meta"):
        theirs = auto.from_config(AutoConfig.for_model(**dict(raw)))
    unread = re.compile(UNREAD.get(name, UNREAD.get(raw["model_type"], "$^")))
    spec = read_spec(HFConfig(raw))
    declared = [param for param in declare_params(spec) if param.kind != "constant" and param.compute is None]
    declared = [param for param in declared if not param.name.endswith("gate")]  # one number for all columns
    named = [parameter for key, parameter in theirs.named_parameters() if not unread.search(key)]
    named += [buffer for key, buffer in theirs.named_buffers() if key.endswith("e_score_correction_bias")]
    assert spec.vision is not None and spec.vision.image_token_id == theirs.config.image_token_id
    assert sum(param.num_elements for param in declared) == sum(parameter.numel() for parameter in named)


def test_a_model_whose_encoder_is_not_known_is_its_language_model() -> None:
    other = HFConfig({**LLAVA, "vision_config": {"model_type": "dinov2"}})
    assert read_spec(other) == read_spec(other, with_images=False)
    assert family_of(other).weights == family_of(other, with_images=False).weights


@pytest.mark.parametrize(("layer", "count"), [(..., 23), (-2, 23), ([-2], 23), (-1, 24), (3, 3), ([-2, 5], 23)])
def test_the_layer_of_llava_whose_patches_are_read(layer: Any, count: int) -> None:
    raw = {key: value for key, value in {**LLAVA, "vision_feature_layer": layer}.items() if value is not ...}
    vision = read_spec(HFConfig(raw)).vision
    assert vision is not None and vision.encoder.num_layers == count


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        ([], "list of layers"),
        ("last", "list of layers"),
        ([-2, True], "list of layers"),
        (-25, "24 layers"),
        (0, "24"),
    ],
)
def test_a_layer_that_cannot_be_read_is_told_with_a_way_out(layer: Any, told: str) -> None:
    config = HFConfig({**LLAVA, "vision_feature_layer": layer})
    with pytest.raises(ModelError, match=told) as caught:
        read_spec(config)
    assert any(remedy.startswith("HEADRACE_IMAGES=0") for remedy in caught.value.remedies)
    assert read_spec(config, with_images=False).vision is None


@pytest.mark.parametrize("side", [4, 14, 16, 24, 26, 27, 32, 64])
@pytest.mark.parametrize("count", [1, 5, 24, 26, 27, 32])
def test_positions_of_a_grid_are_those_of_transformers(side: int, count: int) -> None:
    import torch

    bounds = torch.arange(1 / side, 1.0, 1 / side)
    places = torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count))
    want = torch.bucketize(places.clamp(max=1.0 - 1e-6), bounds, right=True)
    assert np.array_equal(_bucket(count, side), want.numpy())


@pytest.mark.parametrize("section", [[10**12, 24, 24], [16, 24], [-16, 56, 24]])
def test_sections_of_frequencies_that_do_not_add_up(section: list[int]) -> None:
    raw = {**PUBLISHED_VISION["qwen2_5_vl_7b"], "rope_scaling": {"type": "mrope", "mrope_section": section}}
    with pytest.raises(ModelError, match=r"mrope_section in config\.json is .*, which makes no 64 frequencies"):
        read_spec(HFConfig(raw))
