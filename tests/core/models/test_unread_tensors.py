"""Tensors of a checkpoint that no parameter has: only what a config tells of may be passed over."""

import re

import pytest

from headrace.core.models.config import HFConfig
from headrace.core.models.name_tables import checkpoint_names
from headrace.core.models.registry import find_family
from published_decoders import PUBLISHED_DECODERS
from published_recent import PUBLISHED_RECENT
from recent_cases import GEMMA3N, GEMMA4

SIZES = {"vocab_size": 131, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}


def passes_over(config: dict[str, object], name: str) -> bool:
    """True if a tensor of this name may be in the checkpoint and is not read."""
    family = find_family(str(config["model_type"]))
    names = checkpoint_names(family.weights, family.to_spec(HFConfig(config)))
    return any(re.search(pattern, name) for pattern in names.ignore)


@pytest.mark.parametrize(("model_type", "sizes"), [("gemma4_text", GEMMA4), ("gemma3n_text", GEMMA3N)])
def test_keys_and_values_are_passed_over_where_another_layer_has_them(
    model_type: str, sizes: dict[str, object]
) -> None:
    config = {**SIZES, "intermediate_size": 88, **sizes, "model_type": model_type, "num_kv_shared_layers": 2}
    for i in range(4):
        for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
            assert passes_over(config, f"model.layers.{i}.self_attn.{name}") == (i >= 2)
        assert not passes_over(config, f"model.layers.{i}.self_attn.q_proj.weight")


def test_a_value_projection_beside_keys_that_are_values_is_told() -> None:
    config = {**SIZES, "intermediate_size": 88, **GEMMA4, "model_type": "gemma4_text", "attention_k_eq_v": True}
    assert not passes_over(config, "model.layers.1.self_attn.v_proj.weight")


@pytest.mark.parametrize("is_tied", [True, False])
def test_adapters_of_other_layers_are_passed_over_where_blocks_are_not_shared(is_tied: bool) -> None:
    kinds = ["mamba", "hybrid", "mamba", "hybrid"]
    config = {**SIZES, "model_type": "zamba2", "layers_block_type": kinds, "tie_word_embeddings": is_tied}
    at = "model.layers.1.shared_transformer.feed_forward.gate_up_proj_adapter_list"
    assert [passes_over(config, f"{at}.{n}.0.weight") for n in (0, 1, 2)] == [not is_tied, not is_tied, False]


@pytest.mark.parametrize(("name", "further"), [("deepseek_v3", 1), ("glm_4_5_air", 1), ("deepseek_v3_2", 1)])
def test_only_as_many_layers_are_passed_over_as_the_config_tells_of(name: str, further: int) -> None:
    config = dict({**PUBLISHED_DECODERS, **PUBLISHED_RECENT}[name])
    num_layers = int(config["num_hidden_layers"])
    for config["num_hidden_layers"] in (num_layers, num_layers // 2):
        last = config["num_hidden_layers"]
        assert passes_over(config, f"model.layers.{last}.mlp.gate.weight")
        assert not passes_over(config, f"model.layers.{last - 1}.mlp.gate.weight")
        assert not passes_over(config, f"model.layers.{last + further}.mlp.gate.weight")
