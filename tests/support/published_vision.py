"""config.json of published models that read images, as far as it says what they are made of."""

from collections.abc import Mapping
from typing import Any

from published_recurrent import PUBLISHED_RECURRENT
from published_wrappers import PUBLISHED_WRAPPERS

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
_PIXTRAL: Config = {
    "model_type": "pixtral", "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 4096,
    "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 24, "rope_theta": 10000.0,
}  # fmt: skip
_INTERN_VIT: Config = {
    "model_type": "internvl_vision", "attention_bias": True, "hidden_act": "gelu", "hidden_size": 1024,
    "image_size": [448, 448], "intermediate_size": 4096, "layer_norm_eps": 1e-6, "norm_type": "layer_norm",
    "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": [14, 14], "use_qk_norm": False,
    "use_mean_pooling": True, "use_absolute_position_embeddings": True,
}  # fmt: skip
_QWEN3_TOWER: Config = {
    "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152,
    "in_channels": 3, "intermediate_size": 4304, "num_heads": 16, "num_position_embeddings": 2304, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
_GLM_TOWER: Config = {
    "attention_bias": False, "depth": 24, "hidden_act": "silu", "hidden_size": 1536, "image_size": 336,
    "in_channels": 3, "num_heads": 12, "out_hidden_size": 4096, "patch_size": 14, "rms_norm_eps": 1e-5,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip


def _with_images(name: str, vision_config: Config, **more: Any) -> Config:
    """A published config of a language model inside, with what it says of images."""
    return {**PUBLISHED_WRAPPERS[name], "vision_config": vision_config, **more}


_QWEN: Config = {
    "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6, "use_sliding_window": False, "tie_word_embeddings": False, "image_token_id": 151655,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}  # fmt: skip
PUBLISHED_VISION: Mapping[str, Config] = {
    "llama_3_2_11b_vision": _with_images(
        "llama_3_2_11b_vision",
        {
            "model_type": "mllama_vision_model", "attention_heads": 16, "hidden_act": "gelu", "hidden_size": 1280,
            "image_size": 448, "intermediate_layers_indices": [3, 7, 15, 23, 30], "intermediate_size": 5120,
            "max_num_tiles": 4, "norm_eps": 1e-5, "num_channels": 3, "num_global_layers": 8, "num_hidden_layers": 32,
            "patch_size": 14, "vision_output_dim": 7680,
            "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
        },
        image_token_index=128256,
    ),
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
    "pixtral_12b": _with_images(
        "pixtral_12b", {**_PIXTRAL, "image_size": 1024, "patch_size": 16}, image_token_index=10,
        vision_feature_layer=-1, vision_feature_select_strategy="full", projector_hidden_act="gelu",
    ),
    "mistral_small_3_1_24b": _with_images(
        "mistral_small_3_1_24b", {**_PIXTRAL, "image_size": 1540, "patch_size": 14}, image_token_index=10,
        spatial_merge_size=2, vision_feature_layer=-1, multimodal_projector_bias=False, tie_word_embeddings=False,
    ),
    "llava_v1_6_mistral_7b": _with_images(
        "llava_v1_6_mistral_7b", _CLIP_336, image_token_index=32000, vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_grid_pinpoints=[[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    ),
    "llava_onevision_qwen2_0_5b": _with_images(
        "llava_onevision_qwen2_0_5b",
        {**_SIGLIP_SO400M, "image_size": 384, "num_hidden_layers": 26, "vision_use_head": False},
        image_token_index=151646, vision_aspect_ratio="anyres_max_9", vision_feature_layer=-1,
    ),
    "internvl3_1b": _with_images(
        "internvl3_1b", _INTERN_VIT, downsample_ratio=0.5, image_token_id=151667, vision_feature_layer=-1,
        tie_word_embeddings=False,
    ),
    "aya_vision_8b": _with_images(
        "aya_vision_8b", {**_SIGLIP_SO400M, "image_size": 364, "vision_use_head": False}, image_token_index=255036,
        alignment_intermediate_size=28672, downsample_factor=2, adapter_layer_norm_eps=1e-6,
    ),
    "llama_4_scout_17b_16e": _with_images(
        "llama_4_scout_17b_16e",
        {
            "model_type": "llama4_vision_model", "hidden_size": 1408, "image_size": 336, "intermediate_size": 5632,
            "num_attention_heads": 16, "num_hidden_layers": 34, "patch_size": 14, "pixel_shuffle_ratio": 0.5,
            "projector_input_dim": 4096, "projector_output_dim": 4096, "rope_theta": 10000,
            "vision_output_dim": 4096,
        },
        image_token_index=200092,
    ),
    "qwen3_vl_30b_a3b": _with_images(
        "qwen3_vl_30b_a3b", {**_QWEN3_TOWER, "model_type": "qwen3_vl_moe", "out_hidden_size": 2048},
        image_token_id=151655,
    ),
    "glm_4_1v_9b": _with_images(
        "glm_4_1v_9b", {**_GLM_TOWER, "model_type": "glm4v", "intermediate_size": 13696}, image_token_id=151343,
    ),
    "glm_4_5v": _with_images(
        "glm_4_5v", {**_GLM_TOWER, "model_type": "glm4v_moe", "intermediate_size": 10944}, image_token_id=151363,
    ),
    "qwen3_5_27b": {
        "model_type": "qwen3_5", "image_token_id": 248056, "tie_word_embeddings": False,
        "text_config": PUBLISHED_RECURRENT["qwen3_5_27b"],
        "vision_config": {
            **_QWEN3_TOWER, "model_type": "qwen3_5", "deepstack_visual_indexes": [], "out_hidden_size": 5120,
        },
    },
    "qwen3_5_35b_a3b": {
        "model_type": "qwen3_5_moe", "image_token_id": 248056, "tie_word_embeddings": False,
        "text_config": PUBLISHED_RECURRENT["qwen3_5_35b_a3b"],
        "vision_config": {
            **_QWEN3_TOWER, "model_type": "qwen3_5_moe", "deepstack_visual_indexes": [], "out_hidden_size": 2048,
        },
    },
}  # fmt: skip
