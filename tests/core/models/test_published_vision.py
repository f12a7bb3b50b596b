"""What published models that read images are made of, against transformers' classes, and their layout of patches."""

import re
from typing import Any

import numpy as np
import pytest

from headrace.core.models.config import HFConfig
from headrace.core.models.declare import declare_params
from headrace.core.models.registry import read_spec
from headrace.core.runner.images import _bucket
from published_vision import PUBLISHED_VISION

UNREAD = {"llava": r"vision_tower.*(layers\.23\.|post_layernorm)"}
"""Behind the layer whose patches are read."""


@pytest.mark.parametrize("name", PUBLISHED_VISION)
def test_declared_parameters_are_as_many_as_those_of_transformers(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    raw = PUBLISHED_VISION[name]
    auto: Any = AutoModelForImageTextToText
    with torch.device("meta"):
        theirs = auto.from_config(AutoConfig.for_model(**dict(raw)))
    unread = re.compile(UNREAD.get(raw["model_type"], "$^"))
    spec = read_spec(HFConfig(raw))
    declared = [param for param in declare_params(spec) if param.kind != "constant"]
    named = [parameter for key, parameter in theirs.named_parameters() if not unread.search(key)]
    assert spec.vision is not None and spec.vision.image_token_id == theirs.config.image_token_id
    assert sum(param.num_elements for param in declared) == sum(parameter.numel() for parameter in named)


@pytest.mark.parametrize("side", [4, 14, 16, 24, 26, 27, 32, 64])
@pytest.mark.parametrize("count", [1, 5, 24, 26, 27, 32])
def test_positions_of_a_grid_are_those_of_transformers(side: int, count: int) -> None:
    import torch

    bounds = torch.arange(1 / side, 1.0, 1 / side)
    places = torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count))
    want = torch.bucketize(places.clamp(max=1.0 - 1e-6), bounds, right=True)
    assert np.array_equal(_bucket(count, side), want.numpy())
