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


_YARN_40 = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
PUBLISHED_RECENT: Mapping[str, Config] = {
    "ax_k1": _model(
        "axk1", (163840, 7168, 18432, 61, 64, 64, 131072), kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=192, n_shared_experts=1, num_experts_per_tok=8,
        moe_intermediate_size=2048, n_group=8, topk_group=4, routed_scaling_factor=2.5, norm_topk_prob=True,
        first_k_dense_replace=1, moe_layer_freq=1, rope_scaling={**_YARN_40, "factor": 32}, rope_theta=10000,
    ),
    "longcat_flash_chat": {
        "model_type": "longcat_flash", "attention_bias": False, "vocab_size": 131072, "hidden_size": 6144,
        "num_layers": 28, "num_attention_heads": 64, "ffn_hidden_size": 12288, "expert_ffn_hidden_size": 2048,
        "n_routed_experts": 512, "zero_expert_num": 256, "zero_expert_type": "identity", "moe_topk": 12,
        "routed_scaling_factor": 6.0, "router_bias": False, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True, "attention_method": "MLA", "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-05, "rope_theta": 10000000.0, "torch_dtype": "bfloat16",
    },
    "diffllama_0_3b": _model(
        "diffllama", (48588, 1024, 4096, 12, 32, 8, 2048), hidden_act="silu", rms_norm_eps=1e-5, rope_theta=10000.0,
        lambda_std_dev=0.1, tie_word_embeddings=False,
    ),
    "mistral_small_4": _model(
        "mistral4", (131072, 4096, 12288, 36, 32, 32, 1048576), moe_intermediate_size=2048, n_routed_experts=128,
        n_shared_experts=1, num_experts_per_tok=4, kv_lora_rank=256, q_lora_rank=1024, qk_rope_head_dim=64,
        qk_nope_head_dim=64, v_head_dim=128, first_k_dense_replace=0, norm_topk_prob=True, rms_norm_eps=1e-6,
        rope_parameters={
            "type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
        },
    ),
    "apertus_1_5_8b_sizes": _model(
        "apertus1p5_text", (266752, 4096, 21504, 32, 32, 8, 65536), hidden_act="xielu", output_vocab_size=131272,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 12000000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
        tie_word_embeddings=False,
    ),
    "compass_sizes": _model(
        "cohere_compass_text", (262144, 2048, 8192, 24, 16, 4, 131072), head_dim=128, logit_scale=0.25,
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 6, sliding_window=1024,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, "full_attention": None,
        },
    ),
    "emu3_chat_text": _model("emu3_text_model", (184622, 4096, 14336, 32, 32, 8, 9216), rope_theta=1000000.0),
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
    "bitnet_b1_58_2b_4t": _model(
        "bitnet", (128256, 2560, 6912, 30, 20, 5, 4096), hidden_act="relu2", rope_theta=500000.0, rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
    "xglm_564m": {
        "model_type": "xglm", "vocab_size": 256008, "d_model": 1024, "ffn_dim": 4096, "num_layers": 24,
        "attention_heads": 16, "max_position_embeddings": 2048, "activation_function": "gelu",
        "scale_embedding": True,
    },
    "openai_gpt": {
        "model_type": "openai-gpt", "vocab_size": 40478, "n_embd": 768, "n_head": 12, "n_layer": 12,
        "n_positions": 512, "afn": "gelu", "layer_norm_epsilon": 1e-5,
    },
    "ctrl": {
        "model_type": "ctrl", "vocab_size": 246534, "n_embd": 1280, "n_head": 16, "n_layer": 48,
        "n_positions": 50000, "dff": 8192, "layer_norm_epsilon": 1e-6,
    },
    "gpt_neox_japanese_2_7b": {
        "model_type": "gpt_neox_japanese", "vocab_size": 32000, "hidden_size": 2560, "num_hidden_layers": 32,
        "num_attention_heads": 32, "intermediate_multiple_size": 4, "max_position_embeddings": 2048,
        "rotary_pct": 1.0, "rotary_emb_base": 10000, "hidden_act": "gelu", "layer_norm_eps": 1e-5,
    },
    "ettin_decoder_150m": {
        "model_type": "modernbert-decoder", "vocab_size": 50368, "hidden_size": 768, "intermediate_size": 1152,
        "num_hidden_layers": 22, "num_attention_heads": 12, "max_position_embeddings": 7999, "norm_eps": 1e-5,
        "global_attn_every_n_layers": 3, "local_attention": 128, "global_rope_theta": 160000.0,
        "local_rope_theta": 160000.0, "decoder_bias": True, "classifier_activation": "gelu", "norm_bias": False,
    },
    "flint": _model(
        "flint", (150144, 2048, 6144, 49, 32, 4, 262144), head_dim=128, sliding_window=513, num_experts=256,
        num_experts_per_tok=6, moe_intermediate_size=512, shared_expert_intermediate_size=1024,
    ),
    "laguna_xs_sizes": _model(
        "laguna", (100352, 2048, 8192, 40, 48, 8, 131072), head_dim=128, sliding_window=512, num_experts=256,
        num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512, gating="per-head",
        layer_types=["full_attention"] + ["sliding_attention"] * 39,
    ),
    "mimo_v2_flash": _model(
        "mimo_v2_flash", (152576, 4096, 16384, 48, 64, 4, 262144), head_dim=192, v_head_dim=128, sliding_window=128,
        sliding_window_size=128, n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048,
        routed_scaling_factor=None, attention_value_scale=0.707, n_group=1, topk_group=1,
    ),
    "dbrx_instruct": {
        "model_type": "dbrx", "vocab_size": 100352, "d_model": 6144, "n_heads": 48, "n_layers": 40,
        "max_seq_len": 32768, "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000},
        "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}, "torch_dtype": "bfloat16",
        "rope_theta": 500000,
    },
    "deepseek_v3_2": _model(
        "deepseek_v32", (129280, 7168, 18432, 61, 128, 128, 163840), kv_lora_rank=512, q_lora_rank=1536,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=256, num_experts_per_tok=8,
        moe_intermediate_size=2048, first_k_dense_replace=3, routed_scaling_factor=2.5, index_topk=2048,
        rope_scaling=_YARN_40, rope_theta=10000,
    ),
    "glm_5": _model(
        "glm_moe_dsa", (154880, 6144, 12288, 78, 64, 64, 202752), kv_lora_rank=512, q_lora_rank=2048,
        qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, n_routed_experts=256, num_experts_per_tok=8,
        moe_intermediate_size=2048, first_k_dense_replace=3, routed_scaling_factor=2.5, index_topk=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000},
    ),
    "gemma_3n_e2b_text": {
        "model_type": "gemma3n_text", "vocab_size": 262400, "hidden_size": 2048, "intermediate_size": [8192] * 30,
        "num_hidden_layers": 30, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
        "max_position_embeddings": 32768, "sliding_window": 512, "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0, "num_kv_shared_layers": 10, "laurel_rank": 64, "altup_num_inputs": 4,
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20, "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "torch_dtype": "bfloat16",
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6,
    },
    "aria_25b_text": _model(
        "aria_text", (100352, 2560, 1664, 28, 20, 20, 65536), moe_num_experts=64, moe_topk=6,
        moe_num_shared_experts=2, rope_theta=5000000,
    ),
}  # fmt: skip
