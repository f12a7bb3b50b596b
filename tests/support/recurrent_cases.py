"""Tiny configs of every family with recurrences and of its flags, compared with transformers."""

from collections.abc import Mapping
from typing import Any

from paged_model import Case

HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2}
CONV = {"layer_types": ["conv", "full_attention"] * 2}
MAMBA: Mapping[str, Any] = {"state_size": 8, "intermediate_size": 96}
MAMBA2: Mapping[str, Any] = {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 12, "chunk_size": 8}
BAMBA: Mapping[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_chunk_size": 8,
}  # fmt: skip
NEMOTRON_H: Mapping[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    "num_hidden_layers": ..., "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 12,
    "chunk_size": 8, "head_dim": 16, "moe_shared_expert_intermediate_size": 40,
}  # fmt: skip
FALCON_H1: Mapping[str, Any] = {
    **BAMBA, "mamba_d_ssm": 128, "mlp_multipliers": [0.7, 0.6], "ssm_multipliers": [0.9, 0.8, 0.7, 1.2, 1.1],
    "key_multiplier": 0.5, "attention_in_multiplier": 0.9, "attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.7, "embedding_multiplier": 3.0, "lm_head_multiplier": 0.5,
}  # fmt: skip
DELTA: Mapping[str, Any] = {
    **HYBRID, "head_dim": 16, "linear_key_head_dim": 12, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
JAMBA: Mapping[str, Any] = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "num_experts": 4}
ZAMBA2: Mapping[str, Any] = {
    "layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid"], "n_mamba_heads": 8, "mamba_ngroups": 2,
    "mamba_d_state": 12, "chunk_size": 8, "num_mem_blocks": 2, "adapter_rank": 6, "use_mem_rope": True,
    "num_attention_heads": 8, "num_key_value_heads": 8,
}  # fmt: skip
ZAMBA: Mapping[str, Any] = {
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"], "n_mamba_heads": 2,
    "mamba_d_state": 12, "mamba_dt_rank": 6,
}  # fmt: skip
NO_ROPE = {"rope_theta": None, "rope_type": "default"}
LFM3: Mapping[str, Any] = {
    "layer_types": ["conv", "sliding_attention", "full_attention", "conv"], "head_dim": 16, "sliding_window": 6,
}  # fmt: skip
OLMO_DELTA: Mapping[str, Any] = {
    # Saving cuts the convolution into thirds, whatever the sizes of keys and values.
    "linear_num_key_heads": 2, "linear_key_head_dim": 23, "linear_num_value_heads": 4, "linear_value_head_dim": 16,
}  # fmt: skip
KIMI: Mapping[str, Any] = {
    **HYBRID, "linear_num_heads": 4, "linear_head_dim": 16, "num_key_value_heads": 4, "q_lora_rank": None,
    "mlp_layer_types": ["dense"] + ["sparse"] * 3,
}  # fmt: skip
MINIMAX: Mapping[str, Any] = {
    "block_size": 8, "full_attn_alpha_factor": 3.5, "full_attn_beta_factor": 0.9, "linear_attn_alpha_factor": 1.5,
    "linear_attn_beta_factor": 0.8, "mlp_alpha_factor": 2.5, "mlp_beta_factor": 0.7,
}  # fmt: skip
RECURRENT_CASES = (
    Case("mamba", "mamba", MAMBA, has_sdpa=False),
    Case("falcon_mamba", "falcon_mamba", MAMBA, has_sdpa=False),
    Case("mamba2", "mamba2", MAMBA2, has_sdpa=False),
    Case("jamba", "jamba", {**JAMBA, "expert_layer_offset": 0}),
    Case("bamba", "bamba", {**BAMBA, "attn_layer_indices": [1, 3]}),
    Case(
        "granitemoehybrid",
        "granitemoehybrid",
        {**BAMBA, **HYBRID, "attention_multiplier": 0.1, "residual_multiplier": 0.5},
    ),
    Case("nemotron_h", "nemotron_h", NEMOTRON_H),
    Case("falcon_h1", "falcon_h1", FALCON_H1),
    Case("qwen3_next", "qwen3_next", DELTA),
    Case("qwen3_5", "qwen3_5_text", DELTA),
    Case("qwen3_5_moe", "qwen3_5_moe_text", DELTA),
    Case("zamba2", "zamba2", ZAMBA2, lengths=(8, 5)),
    Case("zamba", "zamba", ZAMBA),
    Case("zamba_untied", "zamba", {**ZAMBA, "tie_word_embeddings": False, "n_mamba_heads": 1}, lengths=(9, 4)),
    Case("lfm2", "lfm2", {**CONV, "block_multiple_of": 8}),
    Case("lfm2_moe", "lfm2_moe", CONV),
    Case("lfm3", "lfm3", LFM3),
    Case("olmo_hybrid", "olmo_hybrid", {**HYBRID, **OLMO_DELTA}),
    Case("kimi_linear", "kimi_linear", KIMI),
    Case("minimax", "minimax", {**HYBRID, **MINIMAX}),
    Case("rwkv", "rwkv", {"rescale_every": 2}, has_sdpa=False),
    Case("recurrent_gemma", "recurrent_gemma", {"attention_window_size": 6}),
)
RECURRENT_FLAGS = (
    Case(
        "mamba_biases",
        "mamba",
        {**MAMBA, "use_bias": True, "time_step_rank": 5, "tie_word_embeddings": False},
        has_sdpa=False,
    ),
    Case(
        "mamba2_limits",
        "mamba2",
        {**MAMBA2, "n_groups": 1, "use_bias": True, "time_step_limit": [0.4, 0.9], "use_conv_bias": False},
        has_sdpa=False,
    ),
    Case("jamba_dense", "jamba", {**JAMBA, "attn_layer_offset": 0, "num_experts": 1, "mamba_proj_bias": True}),
    Case(
        "bamba_biases",
        "bamba",
        {**BAMBA, "attn_layer_indices": [0], "attention_bias": True, "mamba_proj_bias": True, "mlp_bias": True},
    ),
    Case(
        "granitemoehybrid_dense",
        "granitemoehybrid",
        {**BAMBA, **HYBRID, "num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    Case(
        "nemotron_h_latent",
        "nemotron_h",
        {**NEMOTRON_H, "layers_block_type": ["moe", "linear_attention"], "moe_latent_size": 24, "use_bias": True},
    ),
    Case("falcon_h1_norm", "falcon_h1", {**FALCON_H1, "mamba_rms_norm": True, "mamba_conv_bias": False}),
    Case(
        "falcon_h1_gate_first",
        "falcon_h1",
        {
            **FALCON_H1,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_proj_bias": True,
            "projectors_bias": True,
        },
    ),
    Case("qwen3_next_mixed", "qwen3_next", {**DELTA, "mlp_only_layers": [1], "norm_topk_prob": False}),
    Case(
        "zamba2_adapted",
        "zamba2",
        {**ZAMBA2, "use_shared_attention_adapter": True, "num_mem_blocks": 1, "use_mem_rope": False},
        lengths=(5, 4),
    ),
    Case("lfm2_bias", "lfm2", {**CONV, "conv_bias": True, "block_auto_adjust_ff_dim": False, "conv_L_cache": 4}),
    Case("lfm3_plain", "lfm3", {**LFM3, "use_attention_gate": False, "use_sandwich_norm": False, "conv_bias": True}),
    Case(
        "olmo_hybrid_nope",
        "olmo_hybrid",
        {**HYBRID, **OLMO_DELTA, "linear_allow_neg_eigval": False, "rope_parameters": NO_ROPE},
    ),
    Case("kimi_linear_latent", "kimi_linear", {**KIMI, "q_lora_rank": 24, "moe_renormalize": False}),
    Case(
        "rwkv_sizes",
        "rwkv",
        {
            "attention_hidden_size": 48,
            "intermediate_size": None,
            "rescale_every": 0,
            "tie_word_embeddings": True,
            "layer_norm_epsilon": 0.1,
        },
        has_sdpa=False,
    ),
    *(
        Case(f"{case.name}_gelu", case.model_type, {**case.config, "hidden_act": "gelu"}, has_sdpa=False)
        for case in RECURRENT_CASES
        if case.name in ("mamba", "mamba2", "jamba", "bamba", "qwen3_next", "minimax")
    ),
    Case("nemotron_h_gelu", "nemotron_h", {**NEMOTRON_H, "mamba_hidden_act": "gelu", "tie_word_embeddings": True}),
    Case("mamba2_one_tap", "mamba2", {**MAMBA2, "conv_kernel": 1}, has_sdpa=False),
    Case("lfm2_one_tap", "lfm2", {**CONV, "conv_L_cache": 1}),
    Case("zamba2_heads", "zamba2", {**ZAMBA2, "attention_head_dim": 24}, lengths=(5, 4)),
    Case("minimax_window", "minimax", {**HYBRID, **MINIMAX, "sliding_window": 6}),
    Case("kimi_linear_untied", "kimi_linear", {**KIMI, "tie_word_embeddings": True}),
    Case(
        "recurrent_gemma_biases",
        "recurrent_gemma",
        {
            "attention_bias": True,
            "num_key_value_heads": 1,
            "block_types": ["attention", "recurrent"],
            "conv1d_width": 3,
        },
    ),
    Case("lfm2_moe_plain", "lfm2_moe", {**CONV, "use_expert_bias": False, "norm_topk_prob": False}),
)
