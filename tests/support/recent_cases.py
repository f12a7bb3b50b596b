"""Tiny configs of families that came after the first hundred, and of their flags, compared with transformers."""

from collections.abc import Mapping
from typing import Any

from paged_model import Case

GEMMA4: Mapping[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 16, "global_head_dim": 24,
    "sliding_window": 6, "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 131,
}  # fmt: skip
MULTIPLIERS: Mapping[str, Any] = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1,
}  # fmt: skip
HALF_SLIDING: Mapping[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 6,
}  # fmt: skip
SWA: Mapping[str, Any] = {
    "attention_multiplier": 0.2, "sliding_window": 6, "layer_rope_theta": [0, 10000.0, 500.0, 10000.0],
}  # fmt: skip
VAULT: Mapping[str, Any] = {"head_dim": 24, "sliding_window": 6, "query_pre_attn_scalar": 20}
COHERE2_MOE: Mapping[str, Any] = {
    "head_dim": 24, "sliding_window": 6, "tie_word_embeddings": False, "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
}  # fmt: skip
FLINT: Mapping[str, Any] = {
    "head_dim": 16, "sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"] * 2,
}  # fmt: skip
LAGUNA: Mapping[str, Any] = {**FLINT, "mlp_layer_types": ["dense"] + ["sparse"] * 3}
MIMO: Mapping[str, Any] = {**LAGUNA, "head_dim": 24, "v_head_dim": 16, "n_group": 1, "num_key_value_heads": 1}
DBRX: Mapping[str, Any] = {
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 10000.0},
    "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 8, "moe_top_k": 2},
}  # fmt: skip
GEMMA3N: Mapping[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 16, "sliding_window": 6,
    "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 100, "laurel_rank": 8,
    "num_kv_shared_layers": 2, "intermediate_size": [88, 88, 40, 40],
    "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0], "tie_word_embeddings": False,
}  # fmt: skip
LATENT: Mapping[str, Any] = {"num_key_value_heads": 4, "n_group": 2, "topk_group": 1}
MODERNBERT: Mapping[str, Any] = {
    "local_attention": 12, "attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True,
    "decoder_bias": False,
}  # fmt: skip
SPARSE = ["dense", "sparse", "sparse", "sparse"]
COMPASS: Mapping[str, Any] = {
    **HALF_SLIDING, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 3, 3]},
        "full_attention": None,
    },
}  # fmt: skip
YARN: Mapping[str, Any] = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0,
}  # fmt: skip
LONGCAT: Mapping[str, Any] = {
    "num_layers": 2, "zero_expert_num": 4, "num_key_value_heads": 4, "head_dim": 8, "expert_ffn_hidden_size": 32,
    "moe_topk": 4,
}  # fmt: skip
MISTRAL4: Mapping[str, Any] = {
    "num_key_value_heads": 4, "n_group": 1, "qk_nope_head_dim": 8, "rope_parameters": {
        **YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
    },
}  # fmt: skip
RECENT_CASES = (
    Case("mistral4", "mistral4", MISTRAL4, lengths=(50, 9)),
    Case("longcat_flash", "longcat_flash", LONGCAT),
    Case("diffllama", "diffllama", {"head_dim": 24}),
    Case("axk1", "axk1", {"num_key_value_heads": 4, "mlp_layer_types": SPARSE}),
    Case("apertus1p5", "apertus1p5_text", {"tie_word_embeddings": False}),
    Case("cohere_compass", "cohere_compass_text", {**COMPASS, "logit_scale": 0.5}),
    Case("gemma4", "gemma4_text", {**GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    Case("iquestcoder", "iquestcoder", {"head_dim": 24}),
    Case("hyperclovax", "hyperclovax", {"head_dim": 16, **MULTIPLIERS, "logits_scaling": 0.25}),
    Case("granite_swa", "granite_swa", {**SWA, "embedding_multiplier": 3.0}, has_sdpa=False),
    Case("granitemoe_swa", "granitemoe_swa", {**SWA, "residual_multiplier": 0.5}, has_sdpa=False),
    Case("mellum", "mellum", {**HALF_SLIDING, "head_dim": 16}),
    Case("solar_open", "solar_open", {"head_dim": 16}),
    Case("sarvam_moe", "sarvam_moe", {"head_dim": 16}),
    Case("sarvam_mla", "sarvam_mla", {"num_key_value_heads": 4, "q_lora_rank": None}),
    Case("exaone_moe", "exaone_moe", {"head_dim": 16, "sliding_window": 6, "mlp_layer_types": SPARSE}),
    Case("flex_olmo", "flex_olmo", {}),
    Case("vaultgemma", "vaultgemma", VAULT, has_sdpa=False),
    Case("nanochat", "nanochat", {}),
    Case("hy_v3", "hy_v3", {"head_dim": 16, "mlp_layer_types": SPARSE}),
    Case("cohere2_moe", "cohere2_moe", {**COHERE2_MOE, "prefix_dense_intermediate_size": 40}),
    Case("aria_text", "aria_text", {"tie_word_embeddings": False}),
    Case("bitnet", "bitnet", {}),
    Case("xglm", "xglm", {"attention_heads": 4}, has_sdpa=False),
    Case("openai_gpt", "openai-gpt", {}, has_sdpa=False),
    Case("ctrl", "ctrl", {"dff": 88}),
    Case("gpt_neox_japanese", "gpt_neox_japanese", {"intermediate_multiple_size": 2}, has_sdpa=False),
    Case("modernbert_decoder", "modernbert-decoder", {"local_attention": 12, "tie_word_embeddings": False}),
    Case("flint", "flint", {**FLINT, "mlp_only_layers": [0]}, has_sdpa=False),
    Case("laguna", "laguna", {**LAGUNA, "num_attention_heads_per_layer": [4, 2, 6, 4]}),
    Case("mimo_v2_flash", "mimo_v2_flash", MIMO, has_sdpa=False),
    Case("dbrx", "dbrx", DBRX),
    Case("deepseek_v32", "deepseek_v32", LATENT),
    Case("glm_moe_dsa", "glm_moe_dsa", {**LATENT, "index_head_dim": 16}),
    Case("gemma3n", "gemma3n_text", GEMMA3N),
)
RECENT_FLAGS = (
    Case("hy_v3_biases", "hy_v3", {"head_dim": 16, "mlp_bias": True}),
    Case("aria_biases", "aria_text", {"mlp_bias": True}),
    Case(
        "longcat_flash_yarn",
        "longcat_flash",
        {**LONGCAT, "rope_parameters": YARN, "zero_expert_num": 0, "router_bias": True},
    ),
    Case("diffllama_biases", "diffllama", {"attention_bias": True, "num_key_value_heads": 4}),
    Case(
        "phi4_multimodal",
        "phi4_multimodal",
        {
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            },
            "audio_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_blocks": 1,
                "num_attention_heads": 2,
                "nemo_conv_channels": 16,
                "ext_pw_out_channel": 16,
                "depthwise_separable_out_channel": 16,
            },
        },
    ),
    Case("apertus1p5_cut", "apertus1p5_text", {"output_vocab_size": 100, "tie_word_embeddings": False}),
    Case("hyperclovax_plain", "hyperclovax", {"use_post_norm": False}),
    Case("solar_open_bias", "solar_open", {"head_dim": 16, "attention_bias": True, "norm_topk_prob": False}),
    Case("exaone_moe_full", "exaone_moe", {"layer_types": ["full_attention"] * 4, "head_dim": 16}),
    Case("flex_olmo_bias", "flex_olmo", {"attention_bias": True, "norm_topk_prob": True, "num_experts_per_tok": 3}),
    Case("nanochat_bias", "nanochat", {"attention_bias": True, "final_logit_softcapping": None}),
    Case("flint_plain", "flint", {**FLINT, "mlp_only_layers": [], "norm_topk_prob": False}, has_sdpa=False),
    Case("ctrl_epsilon", "ctrl", {"dff": 88, "layer_norm_epsilon": 0.1}),
    Case("laguna_ungated", "laguna", {**LAGUNA, "gating": False, "hidden_act": "gelu_accurate"}),
    Case("laguna_elements", "laguna", {**LAGUNA, "gating": "per-element", "moe_router_logit_softcapping": 2.0}),
    Case("mimo_v2_flash_biases", "mimo_v2_flash", {**MIMO, "attention_bias": True, "v_head_dim": 24}, has_sdpa=False),
    Case("bitnet_bias", "bitnet", {"attention_bias": True, "tie_word_embeddings": True}),
    Case("modernbert_decoder_biases", "modernbert-decoder", MODERNBERT),
    Case(
        "gemma3n_plain",
        "gemma3n_text",
        {
            **GEMMA3N,
            "num_kv_shared_layers": 0,
            "altup_num_inputs": 3,
            "altup_correct_scale": False,
            "altup_active_idx": 1,
        },
    ),
    Case("hy_v3_bias", "hy_v3", {"head_dim": 16, "attention_bias": True}),
    Case(
        "cohere2_moe_shared",
        "cohere2_moe",
        {
            **COHERE2_MOE,
            "num_shared_experts": 1,
            "shared_expert_combination_strategy": "sum",
            "expert_selection_fn": "sigmoid",
            "rms_norm_eps": 1e-6,
        },
    ),
    Case(
        "gemma4_experts",
        "gemma4_text",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "top_k_experts": 2,
            "num_experts": 8,
            "moe_intermediate_size": 24,
            "final_logit_softcapping": 8.0,
            "tie_word_embeddings": False,
        },
    ),
)
