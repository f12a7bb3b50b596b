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
SPARSE = ["dense", "sparse", "sparse", "sparse"]
RECENT_CASES = (
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
)
RECENT_FLAGS = (
    Case("hyperclovax_plain", "hyperclovax", {"use_post_norm": False}),
    Case("solar_open_bias", "solar_open", {"head_dim": 16, "attention_bias": True, "norm_topk_prob": False}),
    Case("exaone_moe_full", "exaone_moe", {"layer_types": ["full_attention"] * 4, "head_dim": 16}),
    Case("flex_olmo_bias", "flex_olmo", {"attention_bias": True, "norm_topk_prob": True, "num_experts_per_tok": 3}),
    Case("nanochat_bias", "nanochat", {"attention_bias": True, "final_logit_softcapping": None}),
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
