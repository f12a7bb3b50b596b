"""What config.json of published multimodal models says of the language model inside."""

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]
_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings",
)  # fmt: skip


def _text(model_type: str, sizes: tuple[int, ...], **more: Any) -> Config:
    return {"model_type": model_type, **dict(zip(_KEYS, sizes, strict=True)), "torch_dtype": "bfloat16", **more}


def _qwen(model_type: str, sizes: tuple[int, ...], section: list[int], **more: Any) -> Config:
    scaling = {"type": "mrope", "mrope_section": section}
    more = {"hidden_act": "silu", "use_sliding_window": False, "vision_config": {}, "rope_scaling": scaling, **more}
    return _text(model_type, sizes, rms_norm_eps=1e-6, rope_theta=1000000.0, **more)


_GEMMA4 = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}
_QWEN3_VL = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
_LLAMA_4 = {
    "attention_chunk_size": 8192, "attn_temperature_tuning": True, "floor_scale": 8192, "head_dim": 128,
    "intermediate_size_mlp": 16384, "interleave_moe_layer_step": 1, "no_rope_layers": [], "num_experts_per_tok": 1,
    "num_local_experts": 16, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "rope_scaling": {
        "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip
_LLAMA_3 = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
PUBLISHED_WRAPPERS: Mapping[str, Config] = {
    "gemma_3_4b": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
    },
    "gemma_3_27b": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
            "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
    },
    "gemma_4_e2b": {
        "model_type": "gemma4",
        "text_config": {
            "model_type": "gemma4_text", "attention_k_eq_v": False, "final_logit_softcapping": 30.0,
            "global_head_dim": 512, "head_dim": 256, "hidden_size": 1536, "hidden_size_per_layer_input": 256,
            "intermediate_size": 6144, "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
            "max_position_embeddings": 131072, "num_attention_heads": 8, "num_global_key_value_heads": None,
            "num_hidden_layers": 35, "num_key_value_heads": 1, "num_kv_shared_layers": 20, "rope_parameters": _GEMMA4,
            "sliding_window": 512, "use_double_wide_mlp": True, "vocab_size": 262144, "enable_moe_block": False,
            "vocab_size_per_layer_input": 262144, "use_bidirectional_attention": None,
        },
        "tie_word_embeddings": True,
    },
    "gemma_4_31b": {
        "model_type": "gemma4",
        "text_config": {
            "model_type": "gemma4_text", "attention_k_eq_v": True, "final_logit_softcapping": 30.0,
            "global_head_dim": 512, "head_dim": 256, "hidden_size": 5376, "hidden_size_per_layer_input": 0,
            "intermediate_size": 21504, "max_position_embeddings": 262144, "num_attention_heads": 32,
            "num_global_key_value_heads": 4, "num_hidden_layers": 60, "num_key_value_heads": 16,
            "num_kv_shared_layers": 0, "rope_parameters": _GEMMA4, "sliding_window": 1024,
            "use_double_wide_mlp": False, "vocab_size": 262144, "use_bidirectional_attention": "vision",
        },
        "tie_word_embeddings": True,
    },
    "gemma_4_26b_a4b": {
        "model_type": "gemma4",
        "text_config": {
            "model_type": "gemma4_text", "attention_k_eq_v": True, "enable_moe_block": True,
            "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256, "hidden_size": 2816,
            "hidden_size_per_layer_input": 0, "intermediate_size": 2112, "max_position_embeddings": 262144,
            "moe_intermediate_size": 704, "num_attention_heads": 16, "num_experts": 128,
            "num_global_key_value_heads": 2, "num_hidden_layers": 30, "num_key_value_heads": 8,
            "rope_parameters": _GEMMA4, "sliding_window": 1024, "top_k_experts": 8, "vocab_size": 262144,
        },
        "tie_word_embeddings": True,
    },
    "gemma_4_unified_sizes": {
        "model_type": "gemma4_unified",
        "text_config": {"model_type": "gemma4_unified_text", "num_hidden_layers": 48, "attention_k_eq_v": True},
    },
    "granite_docling_258m_text": {
        "model_type": "granite_docling",
        "text_config": _text("granite_docling_text", (133800, 1024, 2048, 28, 16, 4, 32768), rms_norm_eps=1e-05),
        "tie_word_embeddings": True,
    },
    "llava_1_5_7b": {
        "model_type": "llava",
        "text_config": {
            "model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "torch_dtype": "float16",
            "vocab_size": 32064,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
    },
    "llava_v1_6_mistral_7b": {
        "model_type": "llava_next",
        "text_config": {
            "model_type": "mistral", "intermediate_size": 14336, "max_position_embeddings": 32768,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
            "torch_dtype": "bfloat16", "vocab_size": 32064,
        },
        "tie_word_embeddings": False,
    },
    "llava_onevision_qwen2_0_5b": {
        "model_type": "llava_onevision",
        "text_config": _text(
            "qwen2", (152000, 896, 4864, 24, 14, 2, 32768), rope_theta=1000000.0, max_window_layers=24
        ),
        "tie_word_embeddings": False,
    },
    "pixtral_12b": {
        "model_type": "llava",
        "text_config": {
            "model_type": "mistral", "hidden_size": 5120, "head_dim": 128, "intermediate_size": 14336,
            "is_composition": True, "max_position_embeddings": 1024000, "num_hidden_layers": 40,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0, "sliding_window": None,
            "vocab_size": 131072,
        },
        "tie_word_embeddings": False,
    },
    "mistral_small_3_1_24b": {
        "model_type": "mistral3",
        "text_config": _text(
            "mistral", (131072, 5120, 32768, 40, 32, 8, 131072), head_dim=128, rope_theta=1000000000.0,
            rms_norm_eps=1e-05, sliding_window=None, hidden_act="silu",
        ),
    },
    "smolvlm_instruct": {
        "model_type": "idefics3",
        "text_config": _text(
            "llama", (49155, 2048, 8192, 24, 32, 32, 16384), rope_theta=273768.0, rms_norm_eps=1e-05,
            tie_word_embeddings=False,
        ),
        "tie_word_embeddings": False,
    },
    "smolvlm2_256m": {
        "model_type": "smolvlm",
        "text_config": _text(
            "llama", (49280, 576, 1536, 30, 9, 3, 8192), rope_theta=100000, rms_norm_eps=1e-05, head_dim=64,
            tie_word_embeddings=False,
        ),
        "tie_word_embeddings": False,
    },
    "idefics2_8b": {
        "model_type": "idefics2",
        "text_config": {
            "model_type": "mistral", "max_position_embeddings": 32768, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05, "sliding_window": 4096, "torch_dtype": "bfloat16", "vocab_size": 32003,
        },
        "tie_word_embeddings": False,
    },
    "qwen2_vl_2b": _qwen("qwen2_vl", (151936, 1536, 8960, 28, 12, 2, 32768), [16, 24, 24], tie_word_embeddings=True),
    "qwen2_vl_7b": _qwen(
        "qwen2_vl", (152064, 3584, 18944, 28, 28, 4, 32768), [16, 24, 24], tie_word_embeddings=False
    ),
    "qwen2_5_vl_3b": _qwen(
        "qwen2_5_vl", (151936, 2048, 11008, 36, 16, 2, 128000), [16, 24, 24], tie_word_embeddings=True
    ),
    "qwen2_5_vl_7b": _qwen(
        "qwen2_5_vl", (152064, 3584, 18944, 28, 28, 4, 128000), [16, 24, 24], tie_word_embeddings=False
    ),
    "qwen3_vl_4b": {
        "model_type": "qwen3_vl",
        "text_config": _text(
            "qwen3_vl_text", (151936, 2560, 9728, 36, 32, 8, 262144), head_dim=128, rope_theta=5000000,
            rope_scaling=_QWEN3_VL, rms_norm_eps=1e-06, tie_word_embeddings=True,
        ),
        "tie_word_embeddings": True,
    },
    "qwen3_vl_30b_a3b": {
        "model_type": "qwen3_vl_moe",
        "text_config": _text(
            "qwen3_vl_moe_text", (151936, 2048, 6144, 48, 32, 4, 262144), head_dim=128, rope_theta=5000000,
            rope_scaling=_QWEN3_VL, rms_norm_eps=1e-06, decoder_sparse_step=1, mlp_only_layers=[],
            moe_intermediate_size=768, norm_topk_prob=True, num_experts=128, num_experts_per_tok=8,
        ),
        "tie_word_embeddings": False,
    },
    "llama_4_scout_17b_16e": {
        "model_type": "llama4",
        "text_config": _text("llama4_text", (202048, 5120, 8192, 48, 40, 8, 10485760), **_LLAMA_4),
    },
    "llama_3_2_11b_vision": {
        "model_type": "mllama",
        "text_config": _text(
            "mllama_text_model", (128256, 4096, 14336, 40, 32, 8, 131072), rms_norm_eps=1e-05, rope_theta=500000.0,
            cross_attention_layers=[3, 8, 13, 18, 23, 28, 33, 38], rope_scaling=_LLAMA_3, tie_word_embeddings=False,
        ),
    },
    "internvl3_1b": {
        "model_type": "internvl",
        "text_config": _text(
            "qwen2", (151674, 896, 4864, 24, 14, 2, 32768), rope_theta=1000000.0, rms_norm_eps=1e-06
        ),
    },
    "aya_vision_8b": {
        "model_type": "aya_vision",
        "text_config": {
            "model_type": "cohere2", "bos_token_id": 5, "hidden_size": 4096, "intermediate_size": 14336,
            "layer_norm_eps": 1e-05, "logit_scale": 0.25, "max_position_embeddings": 16384, "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "rope_theta": 50000, "sliding_window": 4096,
            "vocab_size": 256000,
        },
    },
    "glm_4_1v_9b": {
        "model_type": "glm4v",
        "text_config": _text(
            "glm4v_text", (151552, 4096, 13696, 40, 32, 2, 65536), attention_bias=True, rms_norm_eps=1e-05,
            rope_theta=10000.0, partial_rotary_factor=0.5,
            rope_scaling={"rope_type": "default", "mrope_section": [8, 12, 12]},
        ),
        "tie_word_embeddings": False,
    },
    "glm_4_5v": {
        "model_type": "glm4v_moe",
        "text_config": _text(
            "glm4v_moe_text", (151552, 4096, 10944, 46, 96, 8, 65536), attention_bias=True, head_dim=128,
            first_k_dense_replace=1, moe_intermediate_size=1408, n_group=1, n_routed_experts=128, n_shared_experts=1,
            norm_topk_prob=True, num_experts_per_tok=8, partial_rotary_factor=0.5, rms_norm_eps=1e-05,
            rope_scaling={"mrope_section": [8, 12, 12], "rope_type": "default"}, rope_theta=10000.0,
            routed_scaling_factor=1.0, topk_group=1,
        ),
    },
    "glm_ocr": {
        "model_type": "glm_ocr",
        "text_config": _text(
            "glm_ocr_text", (59392, 1536, 4608, 16, 16, 8, 131072), head_dim=128,
            rope_parameters={"rope_theta": 10000, "rope_type": "default", "mrope_section": [16, 24, 24]},
        ),
    },
    "paddleocr_vl_0_9b": {
        "model_type": "paddleocr_vl",
        "text_config": _text(
            "paddleocr_vl_text", (103424, 1024, 3072, 18, 16, 2, 131072), head_dim=128, rope_theta=500000,
            rms_norm_eps=1e-05, rope_scaling={"mrope_section": [16, 24, 24], "type": "default"},
        ),
    },
    "qwen2_audio_7b": {
        "model_type": "qwen2_audio",
        "text_config": {
            "model_type": "qwen2", "bos_token_id": 151643, "intermediate_size": 11008,
            "max_position_embeddings": 8192, "rms_norm_eps": 1e-05, "rope_theta": 10000, "sliding_window": 32768,
            "vocab_size": 156032,
        },
    },
    "voxtral_mini_3b": {
        "model_type": "voxtral",
        "text_config": _text(
            "llama", (131072, 3072, 8192, 30, 32, 8, 131072), head_dim=128, rope_theta=100000000.0, rms_norm_eps=1e-05
        ),
    },
    "qwen2_5_omni_7b": {
        "model_type": "qwen2_5_omni_thinker",
        "text_config": _text(
            "qwen2_5_omni_text", (152064, 3584, 18944, 28, 28, 4, 32768), rope_theta=1000000.0, rms_norm_eps=1e-06,
            rope_scaling={"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
            tie_word_embeddings=False,
        ),
    },
    "qwen3_omni_30b_a3b": {
        "model_type": "qwen3_omni_moe_thinker",
        "text_config": _text(
            "qwen3_omni_moe_text", (152064, 2048, 768, 48, 32, 4, 65536), head_dim=128, rope_theta=1000000,
            moe_intermediate_size=768, norm_topk_prob=True, num_experts=128, num_experts_per_tok=8,
            rope_scaling={"interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        ),
    },
    "shieldgemma_2_4b": {
        "model_type": "shieldgemma2",
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
    },
}  # fmt: skip
"""Towers are left out, as their own classes assume them."""
