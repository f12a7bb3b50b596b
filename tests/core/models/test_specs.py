"""Specs of published models: the config.json on the hub means what transformers' config class makes of it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from headrace.core.errors import ModelError
from headrace.core.kv.groups import kv_groups
from headrace.core.models.config import HFConfig
from headrace.core.models.declare import declare_params
from headrace.core.models.registry import family_names, family_of, read_spec
from headrace.core.models.rope import ONE_ROW, RopeRows, rope_rows
from headrace.core.models.spec import ModelSpec, RopeSpec
from published_decoders import PUBLISHED_DECODERS as decoders
from published_decoders import RESPELLED
from published_encoders import PUBLISHED_ENCODERS as encoders
from published_foundation import (
    GEMMA_2_2B,
    GEMMA_2_27B,
    GEMMA_3_4B_TEXT,
    GPT2,
    GPT2_XL,
    LLAMA_1_7B,
    LLAMA_3_1_8B,
    LLAMA_3_2_1B,
    MISTRAL_7B_V0_1,
    MISTRAL_7B_V0_3,
    MISTRAL_NEMO,
    PHI_3_MINI_4K,
    PHI_3_MINI_128K,
    PHI_4_MINI,
    QWEN2_WINDOW,
    QWEN3_8B,
)
from published_foundation import LONG as _LONG
from published_foundation import PUBLISHED_FOUNDATION as foundation
from published_foundation import SHORT as _SHORT
from published_recent import PUBLISHED_RECENT as recent
from published_recurrent import PUBLISHED_RECURRENT as recurrent
from published_seq2seq import PUBLISHED_SEQ2SEQ as seq2seq
from published_seq2seq import SEQ2SEQ_SIZES
from published_wrappers import PUBLISHED_WRAPPERS as wrappers

PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    **foundation, **encoders, **decoders, **recent, **recurrent, **seq2seq
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [name for name in PUBLISHED if not name.startswith("_") and PUBLISHED[name]["model_type"] not in RESPELLED],
)
def test_a_published_config_means_what_transformers_reads(name: str) -> None:
    from transformers import AutoConfig

    raw = dict(PUBLISHED[name])
    theirs = AutoConfig.for_model(**_copy(raw)).to_dict()
    assert "rope_scaling" not in theirs or theirs["rope_scaling"] is None  # the two spellings really differ
    assert read_spec(HFConfig(raw)) == read_spec(HFConfig(theirs))


@pytest.mark.parametrize("name", wrappers)
def test_the_language_model_inside_a_published_config_is_what_transformers_reads(name: str) -> None:
    from transformers import AutoConfig

    raw = dict(wrappers[name])
    theirs = AutoConfig.for_model(**_copy(raw)).get_text_config()
    stated = raw.get("text_config", raw).get("tie_word_embeddings", raw.get("tie_word_embeddings"))
    tied = theirs.to_dict().get("tie_word_embeddings", False) if stated is None else stated
    expected = read_spec(HFConfig({**theirs.to_dict(), "tie_word_embeddings": tied}))
    got = read_spec(HFConfig(raw), with_images=False)
    assert dataclasses.replace(got, dtype="") == dataclasses.replace(expected, dtype="")


def test_every_family_has_a_published_config() -> None:
    named = {family_of(HFConfig(config)).name for config in (*PUBLISHED.values(), *wrappers.values())}
    assert named == set(family_names())


SIZES_WITHOUT_A_DEFAULT_THAT_FITS: Mapping[str, Mapping[str, Any]] = {
    "codegen": {"rotary_dim": 8}, "gptj": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 15]]},
    "deepseek_v2": {"num_experts_per_tok": 2}, "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2},
    "helium": {"num_key_value_heads": 8}, "jais2": {"num_key_value_heads": 8}, "mamba2": {"num_heads": 8},
    "zamba2": {"num_hidden_layers": 54}, "bitnet": {"num_key_value_heads": 8},
}  # fmt: skip


@pytest.mark.parametrize("model_type", [name for name in family_names() if name not in RESPELLED])
def test_sizes_alone_take_the_defaults_of_the_config_class(model_type: str) -> None:
    """Keys that the hub's files leave out: the family file states what transformers' class assumes."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if model_type in ("gpt2", "gpt_bigcode", "openai_gpt"):
        sizes: dict[str, Any] = {"vocab_size": 500, "n_embd": 48, "n_layer": 3, "n_head": 4}
    elif model_type in {config["model_type"].replace("-", "_") for config in seq2seq.values()}:
        sizes = dict(SEQ2SEQ_SIZES)
    else:
        sizes = {
            "vocab_size": 500, "hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 30,
            "num_attention_heads": 32, **SIZES_WITHOUT_A_DEFAULT_THAT_FITS.get(model_type, {}),
        }  # fmt: skip
    named = model_type if model_type in CONFIG_MAPPING else model_type.replace("_", "-")
    theirs = AutoConfig.for_model(named, **sizes).to_dict()
    assert read_spec(HFConfig({**sizes, "model_type": theirs["model_type"]})) == read_spec(HFConfig(theirs))


@pytest.mark.parametrize(
    "name", ["llama_3_1_8b", "qwen2_5_0_5b", "qwen3_8b", "gemma_2_27b", "gemma_3_1b", "phi_4_mini", "gpt2_xl"]
)
def test_declared_parameters_are_as_many_as_those_of_transformers(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = PUBLISHED[name]
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        theirs = auto.from_config(AutoConfig.for_model(**_copy(dict(raw))))
    declared = declare_params(read_spec(HFConfig(raw)))
    stored = sum(param.num_elements for param in declared if param.kind != "constant")
    assert stored == sum(parameter.numel() for parameter in theirs.parameters())


def test_llama_3_2_1b() -> None:
    spec = read_spec(HFConfig(LLAMA_3_2_1B))
    attn, rope = spec.layers[0].attn, rope_of(spec)
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size, spec.dtype) == (16, 2048, 128256, "bfloat16")
    assert (attn.num_heads, attn.num_kv_heads, attn.head_dim, attn.scale) == (32, 8, 64, 0.125)
    assert spec.tie_word_embeddings and spec.norm.eps == 1e-5 and not attn.qkv_bias
    assert rope.theta == 500000.0 and rope.scaling is not None and rope.scaling.factor == 32.0
    assert set(spec.layers) == {spec.layers[0]}


def test_mistral_slides_only_in_its_first_release() -> None:
    assert {layer.attn.window for layer in read_spec(HFConfig(MISTRAL_7B_V0_1)).layers} == {4096}
    assert {layer.attn.window for layer in read_spec(HFConfig(MISTRAL_7B_V0_3)).layers} == {0}
    nemo = read_spec(HFConfig(MISTRAL_NEMO)).layers[0].attn
    assert (nemo.head_dim, nemo.num_heads) == (128, 32)


def test_qwen2_windows_start_at_max_window_layers() -> None:
    windows = [layer.attn.window for layer in read_spec(HFConfig(QWEN2_WINDOW)).layers]
    assert windows == [0] * 21 + [32768] * 3


def test_gemma_layers() -> None:
    gemma2 = read_spec(HFConfig(GEMMA_2_2B))
    assert [layer.attn.window for layer in gemma2.layers[:4]] == [4096, 0, 4096, 0]
    assert gemma2.embed_scale == 48.0 and gemma2.logit_softcap == 30.0 and gemma2.norm.plus_one
    assert gemma2.layers[0].post_norm and gemma2.layers[0].attn.softcap == 50.0 and gemma2.tie_word_embeddings
    assert read_spec(HFConfig(GEMMA_2_27B)).layers[0].attn.scale == pytest.approx(1 / 12)
    gemma3 = read_spec(HFConfig(GEMMA_3_4B_TEXT))
    assert [layer.attn.window for layer in gemma3.layers[:7]] == [1024] * 5 + [0, 1024]
    sliding, full = rope_of(gemma3, 0), rope_of(gemma3, 5)
    assert (sliding.theta, sliding.scaling) == (10000.0, None)
    assert full.theta == 1000000.0 and full.scaling is not None and full.scaling.factor == 8.0


def test_phi_4_mini_turns_three_quarters_of_a_head() -> None:
    spec = read_spec(HFConfig(PHI_4_MINI))
    assert (spec.layers[0].attn.head_dim, rope_of(spec).rotary_dim) == (128, 96)
    assert rope_rows(spec) == RopeRows(original_len=4096, num_rows=2)
    assert rope_rows(read_spec(HFConfig(PHI_3_MINI_4K))) == ONE_ROW


def test_early_phi_3_calls_longrope_su() -> None:
    """transformers 5 refuses this spelling of the first release; it meant LongRoPE."""
    early = {**PHI_3_MINI_128K, "rope_scaling": {"long_factor": _LONG, "short_factor": _SHORT, "type": "su"}}
    assert read_spec(HFConfig(early)) == read_spec(HFConfig(PHI_3_MINI_128K))


def test_baichuan_2_13b_has_alibi_and_a_head_of_unit_rows() -> None:
    small, large = (read_spec(HFConfig(PUBLISHED[name])) for name in ("baichuan_7b", "baichuan2_13b"))
    assert small.layers[0].attn.rope is not None and not small.lm_head_unit_rows
    assert all(layer.attn.rope is None and layer.attn.alibi_max_bias == 8.0 for layer in large.layers)
    head = declare_params(large)[-1]
    assert head.name == "lm_head.weight" and head.unit_rows and large.max_position_embeddings == 4096


def test_internlm_2_5_and_chatglm_reach_as_far_as_their_files_say() -> None:
    internlm, chatglm = (read_spec(HFConfig(PUBLISHED[name])) for name in ("internlm2_5_7b", "glm_4_9b_chat"))
    assert internlm.max_position_embeddings == 65536
    rope = chatglm.layers[0].attn.rope
    assert rope is not None and rope.interleaved and (rope.rotary_dim, rope.theta) == (64, 5e6)


def test_gpt2_xl() -> None:
    spec = read_spec(HFConfig(GPT2_XL))
    assert (spec.num_layers, spec.num_learned_positions, spec.layers[0].attn.num_heads) == (48, 1024, 25)
    assert spec.layers[0].mlp.intermediate_size == 6400 and spec.layers[0].mlp.activation == "gelu_tanh"
    assert spec.norm.kind == "layer" and spec.tie_word_embeddings and spec.layers[0].attn.rope is None


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (LLAMA_3_1_8B, {"hidden_size": None}, "lacks the key 'hidden_size'"),
        (LLAMA_3_1_8B, {"hidden_size": "big"}, "hidden_size in config.json must be an integer"),
        (LLAMA_3_1_8B, {"num_hidden_layers": 0}, "num_hidden_layers in config.json must be an integer of at least 1"),
        (LLAMA_3_1_8B, {"num_attention_heads": 30}, r"num_attention_heads \(30\) .* num_key_value_heads \(8\)"),
        (LLAMA_3_1_8B, {"hidden_act": "silo"}, "activation 'silo'; did you mean silu"),
        (LLAMA_3_1_8B, {"rms_norm_eps": float("nan")}, "rms_norm_eps in config.json must be a finite number"),
        (LLAMA_3_1_8B, {"attention_bias": "no"}, "attention_bias in config.json must be true or false"),
        (LLAMA_3_1_8B, {"rope_scaling": {"rope_type": "stretchy", "factor": 2.0}}, "type 'stretchy'; known are"),
        (LLAMA_3_1_8B, {"rope_scaling": {"rope_type": "llama3"}}, "rope parameters of config.json lacks .* 'factor'"),
        (LLAMA_3_1_8B, {"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor .* must be above 0"),
        (LLAMA_3_1_8B, {"rope_scaling": 3}, "rope_scaling in config.json must be an object"),
        (LLAMA_3_1_8B, {"quantization_config": {"quant_method": "aqlm"}}, "quantized by 'aqlm'"),
        (QWEN3_8B, {"layer_types": ["full_attention"]}, "36 layers, but layer_types names 1"),
        (QWEN3_8B, {"layer_types": ["linear_attention"] * 36}, "'linear_attention'; known are full_attention"),
        (PHI_4_MINI, {"partial_rotary_factor": 0.5}, "short_factor .* must be a list of 32 finite numbers"),
        (PHI_4_MINI, {"partial_rotary_factor": 1.5}, "rotate 192 of 128"),
        (GPT2, {"n_head": 7}, r"n_embd \(768\) .* no multiple of n_head \(7\)"),
        (GPT2, {"add_cross_attention": True}, "cross attention"),
    ],
)  # fmt: skip
def test_an_impossible_config_is_a_model_error(base: dict[str, Any], change: dict[str, Any], message: str) -> None:
    config = {key: value for key, value in {**base, **change}.items() if value is not None}
    with pytest.raises(ModelError, match=message):
        read_spec(HFConfig(config))


ODD: tuple[Any, ...] = (
    "x",
    "",
    -1,
    0,
    1.5,
    True,
    10**20,
    [],
    [1],
    ["x"],
    [{}],
    {},
    {"a": 1},
    {"rope_type": "yarn"},
    {"rope_type": 1},
)


@pytest.mark.parametrize(
    "name", ["llama_3_2_1b", "qwen2_window", "qwen3_8b", "gemma_2_2b", "gemma_3_1b", "phi_4_mini", "gpt2"]
)
def test_whatever_a_key_holds_only_a_model_error_comes_out(name: str) -> None:
    base = {"layer_types": None, "head_dim": None, "rope_parameters": None, "text_config": None, **PUBLISHED[name]}
    refused = 0
    for key in base:
        for value in ODD:
            try:
                read_spec(HFConfig({**base, key: value}))
            except ModelError:
                refused += 1
    assert refused > 50


def test_the_context_grows_where_a_file_states_the_length_before_stretching() -> None:
    """As vLLM derives it: Qwen's YaRN and linear scaling; Llama 3, Phi and Gemma 3 state the stretched length."""
    lengths = {"qwen2_5_yarn": 131072, "llama_3_1_8b": 131072, "phi_3_mini_128k": 131072, "gemma_3_4b_text": 131072}
    for name, length in lengths.items():
        assert read_spec(HFConfig(PUBLISHED[name])).max_position_embeddings == length
    linear = {**LLAMA_1_7B, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert read_spec(HFConfig(linear)).max_position_embeddings == 8192


def rope_of(spec: ModelSpec, layer: int = 0) -> RopeSpec:
    rope = spec.layers[layer].attn.rope
    assert rope is not None
    return rope


def _copy(value: Any) -> Any:
    """A deep copy: config classes write into what they are given."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return list(value) if isinstance(value, list) else value


def test_layers_of_gemma_4_that_share_keys_and_values_have_no_cache() -> None:
    spec = read_spec(HFConfig(wrappers["gemma_4_e2b"]))
    full, sliding = kv_groups(spec, max_model_len=4096)
    # 35 layers, of which the last 20 read those of layers 13 (sliding) and 14 (full).
    assert full.layer_indices == (4, 9, 14) and set(full.heads) == {(1, 512)}
    assert sliding.layer_indices == (0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13) and set(sliding.heads) == {(1, 256)}
    assert {layer.attn.kv_layer for layer in spec.layers[15:]} == {13, 14}
    names = {param.name for param in declare_params(spec)}
    assert "layers.14.attn.k_norm.weight" in names and "layers.15.attn.k_norm.weight" not in names
