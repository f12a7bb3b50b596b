"""Configs of GPT's descendants with keys that mean nothing there, against transformers' models of them."""

import pytest
import torch
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
    ours, other = (read_spec(HFConfig({**plain.to_dict(), **more})) for more in ({}, {"head_dim": 8}))
    stored = [[param for param in declare_params(spec) if param.kind != "constant"] for spec in (ours, other)]
    assert stored[0] == stored[1]
    if family == "dbrx":  # the ropes of the others heed it, as golden tests prove
        assert other == ours


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("gpt_bigcode", "scale_attn_by_inverse_layer_idx", True),
        ("openai_gpt", "scale_attn_by_inverse_layer_idx", True),
        ("mpt", "hidden_act", "relu"),
        ("ctrl", "activation_function", "gelu"),
        ("phimoe", "num_experts_per_tok", 1),
        ("minicpm3", "rope_interleave", True),
        ("longcat_flash", "n_shared_experts", 2),
        ("longcat_flash", "router_bias", True),
        ("cohere2_moe", "rope_scaling", {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}),
        ("falcon", "n_head", 2),
        ("openai_gpt", "scale_attn_weights", False),
        ("deepseek_v2", "rope_interleave", False),
        ("longcat_flash", "rope_interleave", False),
        ("longcat_flash", "n_group", 4),
        ("hy_v3", "n_group", 4),
        ("hy_v3", "norm_topk_prob", False),
        ("mellum", "partial_rotary_factor", 0.5),
        ("qwen2_moe", "num_local_experts", 4),
        ("afmoe", "num_local_experts", 4),
        ("aria_text", "num_experts_per_tok", 1),
        *(
            (family, "mlp_layer_types", ["sparse", "dense"] * 2)
            for family in ("deepseek_v2", "deepseek_v3", "glm4_moe", "solar_open", "sarvam_moe", "dots1", "afmoe")
        ),
    ],
)
def test_keys_that_a_class_does_not_read_mean_nothing(family: str, key: str, value: object) -> None:
    case = next(case for case in CASES if case.name == family)
    configs = [AutoConfig.for_model(case.model_type, **tiny_sizes(case)) for _ in range(2)]
    setattr(configs[1], key, value)
    models = [causal_lm().from_config(config).eval() for config in configs]
    models[1].load_state_dict(models[0].state_dict(), strict=False)
    ids = torch.arange(3, 20)[None]
    with torch.inference_mode():
        plain, odd = (model(ids, use_cache=False).logits for model in models)
    assert torch.equal(plain, odd)
    assert read_spec(HFConfig(configs[1].to_dict())) == read_spec(HFConfig(configs[0].to_dict()))


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("ernie4_5_moe", "num_experts_per_tok", 1),
        ("hunyuan_v1_moe", "num_experts_per_tok", 1),
        ("longcat_flash", "num_experts_per_tok", 1),
        ("gpt2", "num_attention_heads", 2),
        ("bloom", "num_attention_heads", 2),
        ("recurrent_gemma", "sliding_window", 4),
    ],
)
def test_of_two_spellings_the_one_that_transformers_reads_counts(family: str, key: str, value: int) -> None:
    case = next(case for case in (*FIRST, *CASES) if case.model_type == family)
    sizes = tiny_sizes(case)
    theirs = AutoConfig.for_model(family, **sizes)
    file = {**theirs.to_dict(), key: value}
    own = AutoConfig.for_model(**file)
    assert getattr(own, key) == value != getattr(theirs, key)
    plain = {name: other for name, other in own.to_dict().items() if name != key}
    assert read_spec(HFConfig(file)) == read_spec(HFConfig(plain)) != read_spec(HFConfig(theirs.to_dict()))
