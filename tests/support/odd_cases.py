"""Golden cases with odd configurations: sizes, ropes, layers and flags that families are seldom published with."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from golden_cases import CASES, FIRST
from paged_model import Case

_BY_NAME: Mapping[str, Case] = {case.name: case for case in (*FIRST, *CASES)}
_SIZES: Mapping[str, Any] = {
    "vocab_size": 97, "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 40,
}  # fmt: skip
_BASE = {"rope_theta": 1000.0}
_LENGTH = {"original_max_position_embeddings": 16}
ROPES: Mapping[str, Mapping[str, Any]] = {
    "theta": {"rope_type": "default", "rope_theta": 333.0},
    "linear": {**_BASE, "rope_type": "linear", "factor": 3.0},
    "llama3": {
        **_BASE, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {**_BASE, **_LENGTH, "rope_type": "yarn", "factor": 4.0},
    "yarn_beta": {
        **_BASE, **_LENGTH, "rope_type": "yarn", "factor": 4.0, "attention_factor": 0.8, "beta_fast": 8.0,
        "beta_slow": 2.0,
    },
    "yarn_mscale": {
        **_BASE, **_LENGTH, "rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.9,
        "truncate": False,
    },
    "dynamic": {**_BASE, "rope_type": "dynamic", "factor": 4.0},
    "longrope": {**_BASE, **_LENGTH, "rope_type": "longrope", "factor": 4.0},
    "partial": {**_BASE, "rope_type": "default", "partial_rotary_factor": 0.5},
}  # fmt: skip
"""Rope parameters by what is odd about them. Prompts are of 40 and 9 tokens: both sides of every length above."""
_ROPE_LENGTHS = {"dynamic": 16, "longrope": 64}
_ROTARY_DIMS = {
    "llama": 16, "mistral": 16, "qwen2": 16, "qwen3": 32, "exaone4": 16, "glm": 8, "glm4": 8, "phi": 8,
    "gpt_neox": 4, "stablelm": 4, "nemotron": 8, "cohere": 16, "olmo2": 16, "granite": 16, "smollm3": 16,
    "starcoder2": 16, "persimmon": 8, "ernie4_5": 16, "seed_oss": 16, "qwen2_moe": 16, "qwen3_moe": 16,
    "glm4_moe": 8, "dots1": 16, "minimax_m2": 8, "helium": 16, "arcee": 16, "falcon": 16,
}  # fmt: skip
"""Values of a head that rope turns in each family's golden case."""
_OWN_PART = {
    "glm": 0.5, "glm4": 0.5, "glm4_moe": 0.5, "phi": 0.5, "nemotron": 0.5, "persimmon": 0.5, "minimax_m2": 0.5,
    "gpt_neox": 0.25, "stablelm": 0.25,
}  # fmt: skip
_SMALL = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "cohere", "granite", "smollm3",
    "starcoder2", "exaone4", "seed_oss", "arcee", "apertus", "mixtral", "qwen3_moe", "gpt_oss", "ernie4_5_moe",
)  # fmt: skip
_HALF_SLIDING = ["full_attention"] + ["sliding_attention"] * 3
_FLAGS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("llama", {"attention_bias": True}),
    ("llama", {"mlp_bias": True, "tie_word_embeddings": True}),
    ("qwen2", {"num_key_value_heads": 4, "hidden_act": "gelu_pytorch_tanh"}),
    ("qwen3", {"attention_bias": True, "hidden_act": "relu"}),
    ("granite", {"logits_scaling": 0.3, "embedding_multiplier": 7.0, "residual_multiplier": 0.4}),
    ("cohere", {"logit_scale": 0.7, "tie_word_embeddings": False, "use_qk_norm": True}),
    ("cohere2", {"sliding_window": 5, "layer_types": _HALF_SLIDING}),
    ("gemma2", {"sliding_window": 5, "layer_types": _HALF_SLIDING, "attn_logit_softcapping": 3.0}),
    ("gemma3_text", {"sliding_window": 5, "layer_types": _HALF_SLIDING, "attn_logit_softcapping": 3.0}),
    ("gpt_oss", {"sliding_window": 5, "layer_types": _HALF_SLIDING}),
    ("olmo3", {"sliding_window": 5, "layer_types": _HALF_SLIDING}),
    ("exaone4", {"sliding_window": 5, "layer_types": _HALF_SLIDING}),
    ("mistral", {"sliding_window": 5, "tie_word_embeddings": True}),
    ("starcoder2", {"sliding_window": 5, "use_bias": False, "tie_word_embeddings": False}),
    ("smollm3", {"no_rope_layers": [1, 0, 0, 1], "use_sliding_window": False}),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True}),
    ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    ("falcon", {"parallel_attn": False, "bias": True}),
    ("bloom", {"apply_residual_connection_post_layernorm": True, "tie_word_embeddings": False}),
    ("mpt", {"no_bias": False, "tie_word_embeddings": False}),
    ("opt", {"do_layer_norm_before": False, "enable_bias": False}),
    ("ernie4_5_moe", {"hidden_act": "gelu"}),
    ("aria_text", {"hidden_act": "gelu"}),
    ("mixtral", {"num_experts_per_tok": 3, "sliding_window": 5, "tie_word_embeddings": True}),
    ("qwen2_moe", {"norm_topk_prob": True, "hidden_act": "relu"}),
    ("deepseek_v3", {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "routed_scaling_factor": 0.4}),
    *(("llama", {"hidden_act": name}) for name in ("mish", "leaky_relu", "laplace", "linear", "gelu_10")),
    *(("gpt_neox", {"hidden_act": name}) for name in ("hardswish", "relu6", "sqrtsoftplus", "gelu_python")),
    ("mixtral", {"hidden_act": "mish"}),
    ("gpt_oss", {"swiglu_alpha": 1.1, "swiglu_limit": 1.5}),
    ("gpt_neox", {"rope_parameters": {**_BASE, "rope_type": "default", "partial_rotary_factor": 0.45}}),
    ("gpt_neox", {"head_dim": 6}),
    ("glm", {"head_dim": 10}),
    ("mimo_v2_flash", {"v_head_dim": 56}),
    ("zamba2", {"tie_word_embeddings": False}),
    ("gemma3n", {"vocab_size_per_layer_input": 140}),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3}),
    ("stablelm", {"head_dim": 12}),
    ("persimmon", {"head_dim": 14}),
    *((family, {"rope_parameters": {**_BASE, "partial_rotary_factor": 0.0}}) for family in ("phi", "glm")),
    ("glm4_moe", {"n_shared_experts": 0}),
    ("qwen2_moe", {"shared_expert_intermediate_size": 0}),
)


def _ropes() -> Iterator[Case]:
    for family, rotary_dim in _ROTARY_DIMS.items():
        case = _BY_NAME[family]
        for name, rope in ROPES.items():
            if name == "partial" and rotary_dim == 4:  # half of which is one pair
                continue
            parameters = {**rope}
            if family in _OWN_PART:
                parameters["partial_rotary_factor"] = _OWN_PART[family] * (0.5 if name == "partial" else 1.0)
            if name == "longrope":
                parameters["short_factor"] = [1.0 + 0.1 * i for i in range(rotary_dim // 2)]
                parameters["long_factor"] = [2.0 + 0.3 * i for i in range(rotary_dim // 2)]
            config = {**case.config, "rope_parameters": parameters}
            if name in _ROPE_LENGTHS:
                config["max_position_embeddings"] = _ROPE_LENGTHS[name]
            yield replace(case, name=f"{family}_{name}", config=config, lengths=(40, 9))


def _rest() -> Iterator[Case]:
    for family in _SMALL:
        case = _BY_NAME[family]
        yield replace(case, name=f"{family}_sizes", config={**case.config, **_SIZES, "head_dim": ...})
        if family not in ("phi3", "starcoder2"):
            yield replace(case, name=f"{family}_wide_heads", config={**case.config, **_SIZES, "head_dim": 10})
    for n, (family, flags) in enumerate(_FLAGS):
        case = _BY_NAME[family]
        yield replace(case, name=f"{family}_flags_{n}", config={**case.config, **flags})


ODD_CASES: tuple[Case, ...] = (*_ropes(), *_rest())
QUICK = (
    "llama_yarn_mscale", "llama_longrope", "llama_partial", "glm4_partial", "stablelm_llama3", "gpt_neox_yarn_beta",
    "qwen3_dynamic", "granite_linear", "qwen2_sizes", "gemma3_text_wide_heads", "gpt_oss_sizes", "bloom_flags_18",
    "ernie4_5_moe_flags_21", "gpt_oss_flags_9", "llama_flags_26", "gpt_neox_flags_31", "gpt_oss_flags_36",
    "gpt_neox_flags_37", "gpt_neox_flags_38", "mimo_v2_flash_flags_40", "zamba2_flags_41", "gemma3n_flags_42",
    "qwen2_moe_flags_43", "stablelm_flags_44", "persimmon_flags_45", "phi_flags_46", "glm4_moe_flags_48",
    "qwen2_moe_flags_49",
)  # fmt: skip
"""Of these, what the default run takes."""
