"""Ways to write the same config.json, old and new: each means what transformers' config class makes of it."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from golden_cases import CASES, FIRST
from headrace.core.errors import ModelError
from headrace.core.models.config import HFConfig
from headrace.core.models.registry import read_spec
from paged_model import tiny_sizes

TYPES = (
    "llama", "qwen3", "phi", "gpt_neox", "gpt_neox_japanese", "gpt_oss", "apertus", "cwm", "dbrx", "stablelm",
    "ministral3", "gemma3_text", "gemma4_text", "mimo_v2_flash", "laguna", "lfm3", "mellum", "deepseek_v3", "minimax",
    "minicpm3", "flint",
)  # fmt: skip
_YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64}
ROPES: Mapping[str, Mapping[str, Any]] = {
    "a base": {"rope_theta": 12345},
    "no scaling": {"rope_theta": 1e4, "rope_scaling": None},
    "nothing": {"rope_theta": 777.0, "rope_scaling": {}},
    "old": {"rope_theta": 10000, "rope_scaling": {"type": "linear", "factor": 2}},
    "old yarn": {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", **_YARN}},
    "both names": {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "rope_type": "yarn", **_YARN}},
    "llama3": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **_LLAMA3}},
    "a part": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "new": {"rope_parameters": {"rope_type": "default"}},
    "new beside a base": {"rope_theta": 777.0, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
}
"""Rotary parameters, instead of those of the config."""


def spellings(config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The config with one key gone, null or of another type of number, or with other rotary parameters."""
    for key, value in config.items():
        if key in ("architectures", "model_type", "transformers_version"):
            continue
        yield f"no {key}", {name: other for name, other in config.items() if name != key}
        yield f"{key} is null", {**config, key: None}
        if type(value) is int and value >= 0 and not key.endswith("token_id"):
            yield f"{key} is a float", {**config, key: float(value)}
        if type(value) is float and value.is_integer():
            yield f"{key} is an integer", {**config, key: int(value)}
    ropes = config.get("rope_parameters")
    if isinstance(ropes, dict) and not any(isinstance(value, dict) for value in ropes.values()):
        rest = {name: value for name, value in config.items() if name != "rope_parameters"}
        yield from ((what, {**rest, **rope}) for what, rope in ROPES.items())


@pytest.mark.parametrize("model_type", TYPES)
def test_a_config_means_what_transformers_makes_of_it(model_type: str, tmp_path: Path) -> None:

    case = next(case for case in (*FIRST, *CASES) if case.model_type == model_type)
    whole = AutoConfig.for_model(model_type, **tiny_sizes(case)).to_dict()
    whole = {name: value for name, value in whole.items() if value is not None} | {"model_type": model_type}
    count = 0
    for what, config in spellings(json.loads(json.dumps(whole))):
        (tmp_path / "config.json").write_text(json.dumps(config))
        expected = None
        with suppress(Exception):  # what transformers refuses, or makes sizes of that do not fit together
            theirs = AutoConfig.from_pretrained(tmp_path).to_dict()
            expected = read_spec(HFConfig(theirs | {"model_type": model_type}))
        if expected is None:
            continue
        try:
            spec = read_spec(HFConfig(config))
        except ModelError as error:
            assert "lacks the key" in str(error), (what, error)  # a size, whose default means another model
            continue
        assert spec == expected, what
        count += 1
    assert count > 20
