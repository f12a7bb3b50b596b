"""What config.json of published models says, for families that came after the first hundred."""

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]
_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings",
)  # fmt: skip


def _model(model_type: str, sizes: tuple[int, ...], **more: Any) -> Config:
    return {"model_type": model_type, **dict(zip(_KEYS, sizes, strict=True)), "torch_dtype": "bfloat16", **more}


PUBLISHED_RECENT: Mapping[str, Config] = {
    "iquest_coder_v1_40b": _model(
        "iquestcoder", (76800, 5120, 27648, 80, 40, 8, 131072), head_dim=128, rope_theta=500000.0, rms_norm_eps=1e-5
    ),
    "hyperclovax_seed_think_14b": _model(
        "hyperclovax", (110592, 6144, 14336, 38, 48, 8, 131072), head_dim=128, attention_multiplier=0.0078125,
        embedding_multiplier=10.0, logits_scaling=0.125, residual_multiplier=1.0, use_post_norm=True,
        rope_theta=100000000, rms_norm_eps=1e-5, tie_word_embeddings=False,
    ),
    "granite_swash_2b": _model(
        "granite_swa", (100352, 2560, 8192, 24, 20, 4, 8192), attention_multiplier=0.0078125, sliding_window=128,
        embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=8.0,
        layer_rope_theta=[0, 1e4, 1e4, 1e4] * 6,
    ),
    "granite_swash_3b_a600m": _model(
        "granitemoe_swa", (100352, 1536, 512, 32, 24, 8, 8192), attention_multiplier=0.015625, sliding_window=128,
        num_local_experts=40, num_experts_per_tok=8, shared_intermediate_size=1024,
    ),
    "mellum_2_12b_a2_5b": _model(
        "mellum", (98304, 2304, 7168, 28, 32, 4, 131072), head_dim=128, sliding_window=1024, num_local_experts=64,
        moe_intermediate_size=896, num_experts_per_tok=8, norm_topk_prob=True,
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 7,
    ),
    "solar_open_100b": _model(
        "solar_open", (196608, 4096, 10240, 48, 64, 8, 131072), head_dim=128, rope_theta=1000000,
        n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=1280,
        routed_scaling_factor=1.0, norm_topk_prob=True, first_k_dense_replace=0, partial_rotary_factor=1.0,
        rms_norm_eps=1e-5,
    ),
    "sarvam_30b": _model(
        "sarvam_moe", (262144, 4096, 8192, 19, 64, 4, 131072), head_dim=64, rope_theta=8000000, num_experts=128,
        num_shared_experts=1, num_experts_per_tok=6, moe_intermediate_size=1024, routed_scaling_factor=2.5,
        first_k_dense_replace=1, use_qk_norm=True, use_qkv_bias=False, rms_norm_eps=1e-6,
    ),
    "sarvam_105b": _model(
        "sarvam_mla", (262144, 4096, 16384, 32, 64, 64, 131072), kv_lora_rank=512, q_lora_rank=None,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=2048, first_k_dense_replace=1, routed_scaling_factor=2.5,
    ),
    "k_exaone_236b_a23b": _model(
        "exaone_moe", (153600, 6144, 18432, 48, 64, 8, 262144), head_dim=128, sliding_window=128,
        sliding_window_pattern="LLLG", num_experts=128, num_experts_per_tok=8, num_shared_experts=1,
        moe_intermediate_size=2048, routed_scaling_factor=2.5, rope_theta=1000000,
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 12,
    ),
    "flexolmo_7x7b_1t": _model(
        "flex_olmo", (100352, 4096, 11008, 32, 32, 32, 4096), num_experts=7, num_experts_per_tok=5, rope_theta=500000,
        rms_norm_eps=1e-6,
    ),
    "vaultgemma_1b": _model(
        "vaultgemma", (256000, 1152, 6912, 26, 4, 4, 1024), head_dim=256, hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256, sliding_window=512, final_logit_softcapping=None, attn_logit_softcapping=None,
    ),
    "nanochat_d32": _model("nanochat", (65536, 2048, 8192, 32, 16, 16, 2048), hidden_act="relu2"),
    "hy_3_preview": _model(
        "hy_v3", (120832, 4096, 13312, 80, 64, 8, 131072), head_dim=128, num_experts=192, num_experts_per_tok=8,
        num_shared_experts=1, moe_intermediate_size=1536, router_scaling_factor=2.826, rms_norm_eps=1e-5,
    ),
    "command_a_moe_sizes": _model(
        "cohere2_moe", (256000, 8192, 4096, 40, 64, 8, 131072), head_dim=128, sliding_window=4096, num_experts=64,
        num_experts_per_tok=4, rope_theta=50000.0, first_k_dense_replace=1, logit_scale=0.25,
    ),
    "aria_25b_text": _model(
        "aria_text", (100352, 2560, 1664, 28, 20, 20, 65536), moe_num_experts=64, moe_topk=6,
        moe_num_shared_experts=2, rope_theta=5000000,
    ),
}  # fmt: skip
