"""GPT-NeoX's config against transformers' model of it."""

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.core.models.config import HFConfig
from headrace.core.models.declare import declare_params
from headrace.core.models.registry import read_spec


@pytest.mark.parametrize("family", ["gpt_neox", "gpt_neox_japanese"])
def test_stray_kv_heads_mean_nothing(family: str) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(family, **sizes, intermediate_size=96, num_key_value_heads=2)
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    theirs = model.state_dict()
    qkv = next(value for name, value in theirs.items() if name.endswith("query_key_value.weight"))
    params = declare_params(read_spec(HFConfig(config.to_dict())))
    leaves = tuple(f".0.attn.{name}_proj.weight" for name in ("q", "k", "v", "qkv"))
    rows = sum(param.shape[0] for param in params if param.name.endswith(leaves))
    assert rows == qkv.shape[0], [param.name for param in params]
