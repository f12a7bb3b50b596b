"""config.json of published models that read images, as far as it says what they are made of."""

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]
_CLIP_336: Config = {
    "model_type": "clip_vision_model", "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096,
    "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768, "vocab_size": 32000,
}  # fmt: skip
_SIGLIP_SO400M: Config = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16,
    "num_hidden_layers": 27, "patch_size": 14,
}  # fmt: skip
_VICUNA: Config = {
    "model_type": "llama",
    "vocab_size": 32064,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
_QWEN: Config = {
    "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6, "use_sliding_window": False, "tie_word_embeddings": False, "image_token_id": 151655,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}  # fmt: skip
PUBLISHED_VISION: Mapping[str, Config] = {
    "llava_1_5_7b": {
        "model_type": "llava", "image_token_index": 32000, "projector_hidden_act": "gelu", "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default", "text_config": _VICUNA, "vision_config": _CLIP_336,
    },
    "paligemma_3b_224": {
        "model_type": "paligemma", "image_token_index": 257152, "projection_dim": 2048, "hidden_size": 2048,
        "text_config": {
            "model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384, "num_attention_heads": 8,
            "num_hidden_layers": 18, "num_key_value_heads": 1, "vocab_size": 257216,
        },
        "vision_config": {**_SIGLIP_SO400M, "projection_dim": 2048, "image_size": 224, "vision_use_head": False},
    },
    "gemma_3_4b": {
        "model_type": "gemma3", "image_token_index": 262144, "mm_tokens_per_image": 256,
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
        "vision_config": {**_SIGLIP_SO400M, "image_size": 896, "vision_use_head": False},
    },
    "idefics3_8b": {
        "model_type": "idefics3", "image_token_id": 128257, "scale_factor": 2,
        "text_config": {
            "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128259, "rope_theta": 500000.0,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        },
        "vision_config": {
            "model_type": "idefics3", "hidden_size": 1152, "image_size": 364, "intermediate_size": 4304,
            "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14,
        },
    },
    "smolvlm2_2_2b": {
        "model_type": "smolvlm", "image_token_id": 49190, "scale_factor": 3, "tie_word_embeddings": False,
        "text_config": {
            "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
            "num_hidden_layers": 24, "num_key_value_heads": 32, "vocab_size": 49280, "rope_theta": 273768.0,
            "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "head_dim": 64,
        },
        "vision_config": {
            "model_type": "smolvlm_vision", "hidden_size": 1152, "image_size": 384, "intermediate_size": 4304,
            "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14,
        },
    },
    "qwen2_vl_7b": {
        **_QWEN, "model_type": "qwen2_vl",
        "vision_config": {
            "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "hidden_size": 3584,
            "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2,
        },
    },
    "qwen2_5_vl_7b": {
        **_QWEN, "model_type": "qwen2_5_vl", "max_position_embeddings": 128000,
        "vision_config": {
            "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
            "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "window_size": 112,
            "spatial_patch_size": 14, "fullatt_block_indexes": [7, 15, 23, 31], "temporal_patch_size": 2,
        },
    },
    "qwen3_vl_4b": {
        "model_type": "qwen3_vl", "image_token_id": 151655, "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_vl_text", "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
            "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "rope_theta": 5000000,
            "tie_word_embeddings": True,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        },
        "vision_config": {
            "model_type": "qwen3_vl", "deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_size": 1024,
            "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "intermediate_size": 4096, "num_heads": 16,
            "num_position_embeddings": 2304, "out_hidden_size": 2560, "patch_size": 16, "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    },
}  # fmt: skip
