"""config.json of published models with recurrences: the keys that say what a model is, as their files spell them."""

from collections.abc import Mapping
from typing import Any


def _sizes(model_type: str, sizes: tuple[int, ...], **keys: Any) -> Mapping[str, Any]:
    """sizes: vocabulary, hidden, intermediate, layers, heads, KV heads, positions."""
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings",
    )  # fmt: skip
    common = {"hidden_act": "silu", "torch_dtype": "bfloat16"}
    return {"model_type": model_type, **dict(zip(names, sizes, strict=False)), **common, **keys}


def _mamba(sizes: tuple[int, ...], rank: int, **keys: Any) -> Mapping[str, Any]:
    """sizes: vocabulary, hidden, intermediate, layers."""
    common = {
        "state_size": 16, "expand": 2, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5, "time_step_rank": rank, "model_type": "mamba",
    }  # fmt: skip
    return {**_sizes("mamba", sizes), **common, **keys}


def _bamba(model_type: str, sizes: tuple[int, ...], heads: int, **keys: Any) -> Mapping[str, Any]:
    """heads: of Mamba-2, each of 64 values."""
    common = {
        "mamba_n_heads": heads, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4,
        "mamba_expand": 2, "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_proj_bias": False,
        "rms_norm_eps": 1e-5,
    }  # fmt: skip
    return _sizes(model_type, sizes, **{**common, **keys})


_JAMBA = {
    "attn_layer_offset": 4, "attn_layer_period": 8, "expert_layer_offset": 1, "expert_layer_period": 2,
    "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 2, "mamba_proj_bias": False,
    "num_experts": 16, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
_GRANITE = {
    "attention_bias": False, "attention_multiplier": 0.0078125, "embedding_multiplier": 12, "logits_scaling": 6,
    "residual_multiplier": 0.22, "rope_theta": 10000, "tie_word_embeddings": True,
    "position_embedding_type": "nope", "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
}  # fmt: skip
_NEMOTRON_H = {
    "attention_bias": False, "conv_kernel": 4, "expand": 2, "head_dim": 128, "layer_norm_epsilon": 1e-5,
    "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mlp_bias": False, "mlp_hidden_act": "relu2", "n_groups": 8,
    "ssm_state_size": 128, "tie_word_embeddings": False, "use_bias": False, "use_conv_bias": True,
    "time_step_min": 0.001, "time_step_limit": [0.0, float("inf")],
}  # fmt: skip
_QWEN = {
    "attention_bias": False, "full_attention_interval": 4, "head_dim": 256, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_value_head_dim": 128, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}  # fmt: skip
_QWEN3_5_ROPE = {
    "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_theta": 10000000,
    "rope_type": "default",
}  # fmt: skip
_FALCON_H1 = {
    "attention_bias": False, "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375,
    "embedding_multiplier": 5.656854249492381, "head_dim": 64, "key_multiplier": 0.390625,
    "lm_head_multiplier": 0.0390625, "mamba_norm_before_gate": False, "mamba_rms_norm": False, "mlp_bias": False,
    "mlp_multipliers": [0.8838834764831844, 0.5859375], "projectors_bias": False, "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 1.25, "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5,
    0.3535533905932738], "ssm_out_multiplier": 0.23570226039551587, "tie_word_embeddings": False,
}  # fmt: skip
_RWKV: Mapping[str, Any] = {
    "model_type": "rwkv", "vocab_size": 50277, "hidden_size": 768, "num_hidden_layers": 12, "context_length": 1024,
    "attention_hidden_size": 768, "intermediate_size": 3072, "layer_norm_epsilon": 1e-5, "rescale_every": 6,
    "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
PUBLISHED_RECURRENT: Mapping[str, Mapping[str, Any]] = {
    "mamba_130m": _mamba((50280, 768, 1536, 24), 48),
    "mamba_2_8b": _mamba((50280, 2560, 5120, 64), 160),
    "falcon_mamba_7b": _mamba(
        (65024, 4096, 8192, 64), 256, model_type="falcon_mamba", expand=16, mixer_rms_eps=1e-6,
        tie_word_embeddings=False,
    ),
    "mamba_codestral_7b": {
        "model_type": "mamba2", "vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128,
        "head_dim": 64, "state_size": 128, "n_groups": 8, "expand": 2, "conv_kernel": 4, "chunk_size": 256,
        "use_bias": False, "use_conv_bias": True, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    "recurrentgemma_2b": {
        "architectures": ["RecurrentGemmaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attention_window_size": 2048, "block_types": ["recurrent", "recurrent", "attention"], "bos_token_id": 2,
        "conv1d_width": 4, "embeddings_scale_by_sqrt_dim": True, "eos_token_id": 1, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2560, "intermediate_size": 15360,
        "logits_soft_cap": 30.0, "lru_width": 2560, "model_type": "recurrent_gemma", "num_attention_heads": 10,
        "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "torch_dtype": "bfloat16", "use_cache": True,
        "vocab_size": 256000, "w_init_variance_scale": 0.01,
    },
    "rwkv_4_169m": _RWKV,
    "rwkv_4_14b": {**_RWKV, "hidden_size": 5120, "num_hidden_layers": 40, "attention_hidden_size": 5120,
    "intermediate_size": 20480},
    "jamba_v0_1": _sizes("jamba", (65536, 4096, 14336, 32, 32, 8, 262144), mamba_dt_rank=256, **_JAMBA),
    "jamba_1_5_large": _sizes("jamba", (65536, 8192, 24576, 72, 64, 8, 262144), mamba_dt_rank=512, **_JAMBA),
    "bamba_9b": _bamba(
        "bamba", (128256, 4096, 14336, 32, 32, 8, 262144), 128, attn_layer_indices=[9, 18, 27], attn_rotary_emb=64,
        rope_theta=10000.0, tie_word_embeddings=False,
    ),
    "granite_4_h_tiny": _bamba(
        "granitemoehybrid", (100352, 1536, 512, 40, 12, 4, 131072), 48, num_local_experts=64, num_experts_per_tok=6,
        shared_intermediate_size=1024, **_GRANITE,
    ),
    "granite_4_h_micro": _bamba(
        "granitemoehybrid", (100352, 2048, 8192, 40, 32, 8, 131072), 64, num_local_experts=0, num_experts_per_tok=0,
        shared_intermediate_size=8192, **_GRANITE,
    ),
    "nemotron_h_8b": _sizes(
        "nemotron_h", (131072, 4096, 21504, 52, 32, 8, 8192), mamba_num_heads=128,
        hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", **_NEMOTRON_H,
    ),
    "nemotron_3_nano_30b": _sizes(
        "nemotron_h", (131072, 2688, 1856, 52, 32, 2, 262144), mamba_num_heads=64,
        hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712, n_routed_experts=128, num_experts_per_tok=6, n_shared_experts=1,
        routed_scaling_factor=2.5, n_group=1, topk_group=1, norm_topk_prob=True, **_NEMOTRON_H,
    ),
    "falcon_h1_0_5b": _bamba(
        "falcon_h1", (32784, 1024, 2048, 36, 8, 2, 16384), 24, mamba_d_ssm=1536, **_FALCON_H1
    ),
    "qwen3_next_80b_a3b": _sizes(
        "qwen3_next", (151936, 2048, 5120, 48, 16, 2, 262144), linear_num_value_heads=32, decoder_sparse_step=1,
        mlp_only_layers=[], moe_intermediate_size=512, norm_topk_prob=True, num_experts=512, num_experts_per_tok=10,
        partial_rotary_factor=0.25, rope_scaling=None, rope_theta=10000000, shared_expert_intermediate_size=512,
        **_QWEN,
    ),
    "qwen3_5_27b": _sizes(
        "qwen3_5_text", (248320, 5120, 17408, 64, 24, 4, 262144), linear_num_value_heads=48,
        rope_parameters=_QWEN3_5_ROPE, **_QWEN,
    ),
    "qwen3_5_35b_a3b": {
        key: value
        for key, value in _sizes(
            "qwen3_5_moe_text", (248320, 2048, 0, 40, 16, 2, 262144), linear_num_value_heads=32,
            moe_intermediate_size=512, num_experts=256, num_experts_per_tok=8, shared_expert_intermediate_size=512,
            rope_parameters=_QWEN3_5_ROPE, **_QWEN,
        ).items()
        if key != "intermediate_size"
    },
    "zamba_7b_v1": {
        "model_type": "zamba", "vocab_size": 32000, "hidden_size": 3712, "num_hidden_layers": 76,
        "attention_hidden_size": 7424, "intermediate_size": 14848, "num_attention_heads": 16,
        "num_key_value_heads": 16, "n_mamba_heads": 2, "hidden_act": "gelu", "hidden_mamba_act": "silu",
        "attn_layer_offset": 4, "attn_layer_period": 6, "mamba_conv_bias": True, "mamba_d_conv": 4,
        "mamba_d_state": 16, "mamba_dt_rank": 232, "mamba_expand": 2, "mamba_proj_bias": False,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    "zamba2_2_7b": {
        "model_type": "zamba2", "vocab_size": 32000, "hidden_size": 2560, "num_hidden_layers": 54,
        "intermediate_size": 10240, "num_attention_heads": 32, "num_key_value_heads": 32, "n_mamba_heads": 80,
        "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_ngroups": 1, "num_mem_blocks": 2,
        "adapter_rank": 128, "use_mem_rope": False, "use_shared_attention_adapter": False, "rope_theta": 10000,
        "hidden_act": "gelu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "add_bias_linear": False,
        "layers_block_type": ["hybrid" if i in (6, 12, 18, 24, 30, 36, 42, 47, 51) else "mamba" for i in range(54)],
        "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    },
    "lfm2_1_2b": {
        "model_type": "lfm2", "vocab_size": 65536, "hidden_size": 2048, "num_hidden_layers": 16, "block_dim": 2048,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 128000, "norm_eps": 1e-5,
        "block_auto_adjust_ff_dim": True, "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256, "conv_L_cache": 3, "conv_bias": False, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "rope_theta": 1000000.0, "tie_embedding": True, "torch_dtype": "bfloat16",
    },
    "lfm3_1_7b": _sizes(
        "lfm3", (128000, 2048, 7680, 24, 16, 4, 128000), head_dim=128, conv_L_cache=7, sliding_window=256,
        norm_eps=1e-5,
    ),
    "olmo_hybrid_7b": _sizes(
        "olmo_hybrid", (100352, 3840, 11008, 32, 30, 30, 65536), linear_num_key_heads=30, linear_num_value_heads=30,
        linear_key_head_dim=96, linear_value_head_dim=192, linear_conv_kernel_dim=4, linear_allow_neg_eigval=True,
        rms_norm_eps=1e-6, rope_parameters={"rope_theta": None, "rope_type": "default"},
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 8,
    ),
    "kimi_linear_48b_a3b": {
        "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "model_max_length": 1048576,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "moe_intermediate_size": 1024, "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1,
        "num_expert_group": 1, "topk_group": 1, "moe_renormalize": True, "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16",
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
            "kda_layers": [i for i in range(1, 27) if i % 4], "short_conv_kernel_size": 4,
        },
    },
    "minimax_text_01": _sizes(
        "minimax", (200064, 6144, 9216, 80, 64, 8, 10240000), head_dim=128, num_local_experts=32,
        num_experts_per_tok=2, rope_theta=10000000, block_size=256, full_attn_alpha_factor=3.5565588200778455,
        full_attn_beta_factor=1.0, linear_attn_alpha_factor=3.5565588200778455, linear_attn_beta_factor=1.0,
        mlp_alpha_factor=3.5565588200778455, mlp_beta_factor=1.0, rms_norm_eps=1e-5,
        layer_types=(["linear_attention"] * 7 + ["full_attention"]) * 10,
    ),
    "lfm2_8b_a1b": {
        "model_type": "lfm2_moe", "vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 7168,
        "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 8, "norm_eps": 1e-5,
        "max_position_embeddings": 128000, "conv_L_cache": 3, "conv_bias": False, "moe_intermediate_size": 1792,
        "num_experts": 32, "num_experts_per_tok": 4, "num_dense_layers": 2, "norm_topk_prob": True,
        "routed_scaling_factor": 1.0, "use_expert_bias": True, "rope_theta": 1000000.0, "tie_embedding": True,
        "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
        "torch_dtype": "bfloat16",
    },
}  # fmt: skip
"""By the name of the model, roughly as published."""
