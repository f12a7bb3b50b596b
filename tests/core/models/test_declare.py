"""Declared parameters are consistent, and say how they may be cut and packed."""

import dataclasses
import pickle
import re

import pytest

from headrace.core.models.config import HFConfig
from headrace.core.models.declare import declare_params
from headrace.core.models.needs import FEATURES, model_needs
from headrace.core.models.params import Param
from headrace.core.models.registry import family_names, read_spec
from headrace.core.models.rope import distinct_ropes, rope_numbers
from headrace.core.models.spec import AdaptersSpec, ForeignSpec, ModelSpec

SIZES = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "n_embd": 64, "n_layer": 2, "n_head": 4,
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "num_layers": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 80, "d_ff": 96, "d_kv": 16,
    "num_heads": 4,
    "rotary_dim": 8, "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_groups": 2, "max_position_embeddings": 128,
}  # fmt: skip
OWN_SIZES = {"gemma3n_text": {"num_kv_shared_layers": 1}, "mimo_v2_flash": {"head_dim": 24, "v_head_dim": 8}}
ADDS_ONE = r"((vault|recurrent_)?gemma(?!4|3n)|nemotron$|qwen3_(next|5))"
"""Families whose norms, but for those of recurrences, are stored less one."""
EMBEDDINGS = ("embed_tokens.weight", "embed_layers.weight", "encoder.embed_tokens.weight")


@pytest.mark.parametrize("model_type", family_names())
def test_declarations_hold_together(model_type: str) -> None:
    params = declare_params(tiny(model_type))
    names = [param.name for param in params]
    assert len(set(names)) == len(names)
    for param in params:
        assert all(size > 0 for size in param.shape)
        if param.parts and param.combine is None:
            assert sum(part.rows for part in param.parts) == param.shape[0]
        assert param.kind != "constant" or param.compute is not None
        if param.compute is not None:
            assert param.compute().shape == param.shape and param.compute().dtype == "float32"
        assert not param.quantizable or param.kind in ("linear", "stacked") or param.name in EMBEDDINGS
        assert param.shape[0] % (param.num_groups * param.num_stacked) == 0
        is_norm = "norm" in param.name and ".mixer." not in param.name and param.name.endswith("weight")
        assert param.plus_one == (re.match(ADDS_ONE, model_type) is not None and is_norm)


def test_llama_by_name() -> None:
    params = by_name(tiny("llama"))
    qkv = params["layers.0.attn.qkv_proj.weight"]
    assert qkv.shape == (64 + 32 + 32, 64) and qkv.shard == "column"
    assert [(part.name, part.rows) for part in qkv.parts] == [
        ("layers.0.attn.q_proj.weight", 64),
        ("layers.0.attn.k_proj.weight", 32),
        ("layers.0.attn.v_proj.weight", 32),
    ]
    assert [part.rows for part in params["layers.5.mlp.gate_up_proj.weight"].parts] == [96, 96]
    assert params["layers.5.mlp.down_proj.weight"].shard == params["layers.5.attn.o_proj.weight"].shard == "row"
    assert params["lm_head.weight"].shape == (100, 64) and params["lm_head.weight"].shard == "vocab"
    assert params["rope.0.inv_freq"].shape == (1, 8) and params["rope.0.attention_factor"].shape == (1,)
    assert "layers.0.attn.qkv_proj.bias" not in params and "embed_positions.weight" not in params


def test_a_tied_head_is_not_declared() -> None:
    assert "lm_head.weight" not in by_name(tiny("llama", tie_word_embeddings=True))


def test_biases_are_cut_as_their_weights_except_after_a_sum() -> None:
    params = by_name(tiny("llama", attention_bias=True, mlp_bias=True))
    assert params["layers.0.attn.qkv_proj.bias"].shard == "column"
    assert [part.rows for part in params["layers.0.attn.qkv_proj.bias"].parts] == [64, 32, 32]
    assert params["layers.0.attn.o_proj.bias"].shard == params["layers.0.mlp.down_proj.bias"].shard == "replicated"
    assert params["layers.0.mlp.gate_up_proj.bias"].shape == (192,)


def test_gpt2_and_gemma_have_what_llama_has_not() -> None:
    gpt2 = by_name(tiny("gpt2"))
    assert gpt2["embed_positions.weight"].shape == (128, 64) and gpt2["final_norm.bias"].kind == "vector"
    assert gpt2["layers.0.mlp.up_proj.weight"].shape == (256, 64) and "rope.0.inv_freq" not in gpt2
    gemma3 = tiny("gemma3_text")
    names = by_name(gemma3)
    assert {"layers.0.attn.q_norm.weight", "layers.0.attn_post_norm.weight", "layers.0.mlp_post_norm.weight"} <= set(
        names
    )
    assert len(distinct_ropes(gemma3)) == 2 and "rope.1.inv_freq" in names
    assert rope_numbers(gemma3) == [0, 0, 0, 0, 0, 1] and rope_numbers(tiny("gpt2")) == [-1, -1]


def test_equal_ropes_are_one_even_if_they_are_two_objects() -> None:
    spec = tiny("gemma3_text")
    copies = dataclasses.replace(spec, layers=tuple(pickle.loads(pickle.dumps(layer)) for layer in spec.layers))
    assert copies == spec and rope_numbers(copies) == rope_numbers(spec)


def test_a_head_bias_is_declared() -> None:
    spec = dataclasses.replace(tiny("llama"), lm_head_bias=True)
    assert by_name(spec)["lm_head.bias"].shape == (100,)


def test_needs_are_what_a_device_may_lack() -> None:
    assert model_needs(tiny("llama")) == []
    needs = model_needs(tiny("gemma2"))
    assert [need.feature for need in needs] == ["sliding_window", "softcap"]
    assert all(need.required and "gemma2" in need.why for need in needs)
    longrope = {
        "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
    }  # fmt: skip
    asked = {need.feature for need in model_needs(tiny("phi3", rope_scaling=longrope))}
    assert asked == {"rope_variants"}
    t5 = {need.feature for need in model_needs(tiny("t5"))}
    assert t5 == {"relative_bias", "cross_attention"}
    assert [need.feature for need in model_needs(tiny("mamba"))] == ["states"]
    llama4 = {need.feature for need in model_needs(tiny("llama4_text"))}
    assert llama4 == {"chunked_attention"}
    foreign = dataclasses.replace(tiny("llama"), foreign=ForeignSpec(attention=(), params=()))
    assert [need.feature for need in model_needs(foreign)] == ["foreign_code"]
    with_room = dataclasses.replace(tiny("llama"), adapters=AdaptersSpec(num_adapters=2, rank=4))
    assert [need.feature for need in model_needs(with_room)] == ["lora"]
    asked |= t5 | llama4 | {"lora", "states", "foreign_code", "images"} | {need.feature for need in needs}
    assert asked == set(FEATURES)


def tiny(model_type: str, **changes: object) -> ModelSpec:
    return read_spec(HFConfig({"model_type": model_type, **SIZES, **OWN_SIZES.get(model_type, {}), **changes}))


def by_name(spec: ModelSpec) -> dict[str, Param]:
    return {param.name: param for param in declare_params(spec)}
