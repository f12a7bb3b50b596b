"""Configs of GPT's descendants with keys that mean nothing there, against transformers' models of them."""

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from golden_cases import CASES, FIRST
from headrace.core.models.config import HFConfig
from headrace.core.models.declare import declare_params
from headrace.core.models.registry import read_spec
from paged_model import causal_lm, tiny_sizes


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


STRAY = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_theta": 777.0,
    "rope_scaling": {"type": "linear", "factor": 2.0},
}
"""Keys of other families, which the classes of these have not, and do not read."""


@pytest.mark.parametrize(
    "family", ["gpt2", "gpt_bigcode", "opt", "biogpt", "gptj", "codegen", "gpt_neo", "bloom", "mpt", "xglm", "ctrl"]
)
def test_keys_of_other_families_mean_nothing(family: str) -> None:
    case = next(case for case in (*FIRST, *CASES) if case.model_type == family)
    plain = AutoConfig.for_model(family, **tiny_sizes(case))
    stray = AutoConfig.for_model(family, **{**tiny_sizes(case), **STRAY})
    sizes, odd = (
        {name: tensor.shape for name, tensor in causal_lm().from_config(config).state_dict().items()}
        for config in (plain, stray)
    )
    assert sizes == odd
    assert read_spec(HFConfig({**plain.to_dict(), **STRAY})) == read_spec(HFConfig(plain.to_dict()))


@pytest.mark.parametrize("family", ["stablelm", "persimmon", "dbrx"])
def test_heads_are_shares_of_the_hidden_size_whatever_head_dim_says(family: str) -> None:
    case = next(case for case in CASES if case.model_type == family)
    plain = AutoConfig.for_model(family, **tiny_sizes(case))
    stray = AutoConfig.for_model(family, **{**tiny_sizes(case), "head_dim": 8})
    sizes, odd = (
        {name: tensor.shape for name, tensor in causal_lm().from_config(config).state_dict().items()}
        for config in (plain, stray)
    )
    assert sizes == odd
    assert read_spec(HFConfig({**plain.to_dict(), "head_dim": 8})) == read_spec(HFConfig(plain.to_dict()))
