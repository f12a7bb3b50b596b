"""Model types that are another family under a name of their own: which one, and the defaults that differ."""

from collections.abc import Mapping
from typing import Any

_QWEN2_VL: Mapping[str, Any] = {
    "num_key_value_heads": 8, "max_window_layers": 80, "rope_theta": 1000000.0, "rms_norm_eps": 1e-5,
}  # fmt: skip
_GLM4V: Mapping[str, Any] = {
    "head_dim": None, "max_position_embeddings": 32768, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5,
}  # fmt: skip
ALIASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "camembert": ("roberta", {"vocab_size": 30522}),
    "emu3_text_model": (
        "llama",
        {
            "num_key_value_heads": 8, "max_position_embeddings": 9216, "rope_theta": 1000000.0, "rms_norm_eps": 1e-5,
        },
    ),
    "gemma4_unified_text": (
        "gemma4_text",
        {"hidden_size_per_layer_input": 0, "max_position_embeddings": 262144, "sliding_window": 1024},
    ),
    "glm4v_moe_text": ("glm4_moe", {"attention_bias": True, "max_position_embeddings": 65536}),
    "glm4v_text": ("glm4", _GLM4V),
    "glm_ocr_text": (
        "glm4",
        {**_GLM4V, "attention_bias": False, "max_position_embeddings": 131072, "num_key_value_heads": 8},
    ),
    "glm_moe_dsa": (
        "deepseek_v32",
        {
            "max_position_embeddings": 202752, "kv_lora_rank": 512, "q_lora_rank": 2048, "qk_nope_head_dim": 192,
            "v_head_dim": 256, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5,
        },
    ),
    "granite_docling_text": (
        "granite",
        {
            "num_key_value_heads": 4, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True, "embedding_multiplier": 12.0, "logits_scaling": 4.0,
            "residual_multiplier": 0.263, "attention_multiplier": 0.015625,
        },
    ),
    "iquestcoder": (
        "llama",
        {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
    ),
    "ministral": ("mistral", {}),
    "mvp": ("bart", {}),
    "paddleocr_vl_text": (
        "llama",
        {
            "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "rope_theta": 500000.0,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        },
    ),
    "plbart": ("bart", {"scale_embedding": True}),
    "qwen2_5_omni_text": ("qwen2", {"num_key_value_heads": 4, "rope_theta": 1000000.0, "tie_word_embeddings": True}),
    "qwen2_5_vl_text": ("qwen2", _QWEN2_VL),
    "qwen2_vl_text": ("qwen2", _QWEN2_VL),
    "qwen3_omni_moe_text": ("qwen3_moe", {"norm_topk_prob": True, "rope_theta": 1000000.0}),
    "sarvam_mla": (
        "deepseek_v3",
        {
            "n_routed_experts": 128, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
        },
    ),
    "xlm_roberta": ("roberta", {"vocab_size": 30522}),
    "solar_open": (
        "glm4_moe",
        {
            "intermediate_size": 1280, "moe_intermediate_size": 1280, "first_k_dense_replace": 0, "head_dim": 128,
            "partial_rotary_factor": 1.0, "rope_theta": 1000000.0,
        },
    ),
    "qwen3_vl_text": ("qwen3", {"max_position_embeddings": 128000, "rope_theta": 500000.0}),
}  # fmt: skip
"""model_type -> (family, what its config class assumes where a file does not say)."""
