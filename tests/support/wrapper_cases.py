"""Tiny multimodal checkpoints made by transformers, whose language model is compared as it reads text alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from paged_model import Case, assert_close, load_folder, make_sequences, randomise, tiny_sizes
from recent_cases import COMPASS, GEMMA3N
from recurrent_cases import LFM3, NEMOTRON_H

TOWER_SIZES: Mapping[str, Any] = {
    "hidden_size": 32, "embed_dim": 32, "intermediate_size": 40, "num_hidden_layers": 1, "depth": 1, "num_layers": 1,
    "num_attention_heads": 2, "num_heads": 2, "image_size": 28, "patch_size": 14, "out_hidden_size": 64,
    "fullatt_block_indexes": [0], "deepstack_visual_indexes": [0], "num_global_layers": 1, "encoder_layers": 1,
    "num_position_embeddings": 4, "vision_output_dim": 48, "projector_output_dim": 64, "projector_input_dim": 32,
    "intermediate_layers_indices": [0], "d_model": 32, "encoder_attention_heads": 2, "encoder_ffn_dim": 40,
}  # fmt: skip


@dataclass(frozen=True)
class WrapperCase:
    """One tiny checkpoint. text: the language model inside; config: further keys."""

    model_type: str
    text_type: str
    text: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    tower_sizes: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    is_reversible: bool = True
    """False where transformers does not write the names that it reads"""

    def __str__(self) -> str:
        return self.name or self.model_type


MROPE: Mapping[str, Any] = {
    "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3], "mrope_interleaved": True,
}  # fmt: skip
HALF_MROPE = {**MROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
MISTRAL4: Mapping[str, Any] = {
    "num_key_value_heads": 4, "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 10000.0,
        "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
    },
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 24}  # no square matrices, whose orientation could not be seen
GEMMA3: Mapping[str, Any] = {"head_dim": 24, "sliding_window": 6, "query_pre_attn_scalar": 20, "layer_types": None}
GEMMA4: Mapping[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 16, "global_head_dim": 24,
    "sliding_window": 6, "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 131,
}  # fmt: skip
GEMMA4_UNIFIED = {**GEMMA4, "hidden_size_per_layer_input": ..., "vocab_size_per_layer_input": ...}
DELTA: Mapping[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": 16, "linear_key_head_dim": 12,
    "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
SAM: Mapping[str, Any] = {"output_channels": 16, "window_size": 2, "global_attn_indexes": [0], "mlp_dim": 40}
PIXTRAL: Mapping[str, Any] = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip
TOKENIZER: Mapping[str, Any] = {
    "base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "codebook_size": 8, "codebook_dim": 32,
}  # fmt: skip
WRAPPER_CASES = (
    WrapperCase("gemma3", "gemma3_text", GEMMA3, {"mm_tokens_per_image": 4}),
    WrapperCase("gemma3", "gemma3_text", GEMMA3, {"tie_word_embeddings": False}, name="gemma3_untied"),
    WrapperCase("shieldgemma2", "gemma3_text", GEMMA3, {"mm_tokens_per_image": 4}),
    WrapperCase("gemma4", "gemma4_text", {**GEMMA4, "num_kv_shared_layers": 2}, {"vision_config": None}),
    WrapperCase(
        "gemma4_unified", "gemma4_unified_text", GEMMA4_UNIFIED, {"vision_config": None, "audio_config": None}
    ),
    WrapperCase("llava", "llama"),
    WrapperCase("llava", "mistral", {"sliding_window": None}, {"vision_config": PIXTRAL}, name="pixtral"),
    WrapperCase("llava_next", "qwen2"),
    WrapperCase("llava_next_video", "llama"),
    WrapperCase("llava_onevision", "qwen2"),
    WrapperCase("vipllava", "llama"),
    WrapperCase("video_llava", "llama"),
    WrapperCase("mistral3", "mistral", {"sliding_window": None}),
    WrapperCase("mistral3", "ministral3", {}, {"tie_word_embeddings": False}, name="ministral3"),
    WrapperCase("mistral3", "mistral4", MISTRAL4, name="mistral4"),
    WrapperCase("idefics2", "mistral", {"sliding_window": None}),
    WrapperCase("idefics3", "llama"),
    WrapperCase("smolvlm", "llama", {"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
    WrapperCase("qwen2_vl", "qwen2_vl_text", {"rope_parameters": MROPE}),
    WrapperCase("qwen2_5_vl", "qwen2_5_vl_text", {"rope_parameters": MROPE}),
    WrapperCase("qwen3_vl", "qwen3_vl_text", {"head_dim": 16, "rope_parameters": MROPE}),
    WrapperCase("qwen3_vl_moe", "qwen3_vl_moe_text", {"head_dim": 16, "rope_parameters": MROPE, **EXPERTS}),
    WrapperCase("qwen3_5", "qwen3_5_text", DELTA),
    WrapperCase("qwen3_5_moe", "qwen3_5_moe_text", DELTA),
    WrapperCase("llama4", "llama4_text", {"head_dim": 16, "floor_scale": 8}),
    WrapperCase("mllama", "mllama_text_model", {"cross_attention_layers": [3]}),
    WrapperCase("internvl", "qwen2"),
    WrapperCase("internvl", "qwen3", {"head_dim": 16}, name="internvl3_5"),
    WrapperCase("aria", "aria_text"),
    WrapperCase("granite_docling", "granite_docling_text"),
    WrapperCase("hyperclovax_vision_v2", "hyperclovax"),
    WrapperCase("aya_vision", "cohere2", {"sliding_window": 6, "logit_scale": 1.0}),
    WrapperCase("cohere2_vision", "cohere2", {"sliding_window": 6, "logit_scale": 1.0}),
    WrapperCase("glm4v", "glm4v_text", {"rope_parameters": MROPE}),
    WrapperCase("glm46v", "glm4v_text", {"rope_parameters": HALF_MROPE}),
    WrapperCase("glm4v_moe", "glm4v_moe_text", {"rope_parameters": HALF_MROPE}),
    WrapperCase("glm_ocr", "glm_ocr_text", {"rope_parameters": MROPE}),
    WrapperCase("got_ocr2", "qwen2", tower_sizes=SAM),
    WrapperCase("kimi_k25", "deepseek_v3", {"num_key_value_heads": 4}, is_reversible=False),
    WrapperCase("lfm2_vl", "lfm2", {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 8}),
    WrapperCase("lighton_ocr", "qwen3", {"head_dim": 16}),
    WrapperCase("ovis2", "qwen2"),
    WrapperCase("exaone4_5", "exaone4", {"sliding_window": 6}),
    WrapperCase("deepseek_vl", "llama"),
    WrapperCase("janus", "llama"),
    WrapperCase("paddleocr_vl", "paddleocr_vl_text", {"rope_parameters": MROPE, "head_dim": 16}),
    WrapperCase("video_llama_3", "qwen2"),
    WrapperCase("fuyu", "persimmon"),
    WrapperCase("voxtral", "llama"),
    WrapperCase(
        "apertus1p5", "apertus1p5_text", {"tie_word_embeddings": False, "output_vocab_size": 110},
        {"image_token_id": 3, "audio_token_id": 4, "image_token_offset": 112, "audio_token_offset": 120},
        tower_sizes={**TOKENIZER, "vocab_size": 8},
    ),
    WrapperCase("cohere_compass", "cohere_compass_text", COMPASS),
    WrapperCase(
        "emu3", "emu3_text_model", {"vocab_size": 131},
        {"vocabulary_map": {"<image>": 3, **{f"<|visual token {i:06d}|>": 4 + i for i in range(8)}}},
        tower_sizes=TOKENIZER,
    ),
    WrapperCase("gemma3n", "gemma3n_text", GEMMA3N),
    WrapperCase("deepseek_vl_hybrid", "llama"),
    WrapperCase("fast_vlm", "qwen2"),
    WrapperCase("glmga", "glm4v_text", {"rope_parameters": HALF_MROPE}),
    WrapperCase("lfm3_vl", "lfm3", LFM3),
    WrapperCase("minicpm_ocr", "qwen3_5_text", DELTA),
    WrapperCase("minicpmv4_6", "qwen3_5_text", DELTA),
    WrapperCase("minicpmv4_7", "qwen3_5_text", DELTA),
    WrapperCase("nemotron_h_omni", "nemotron_h", NEMOTRON_H, tower_sizes={"video_temporal_patch_size": 2}),
    WrapperCase("perception_lm", "llama", tower_sizes={"model_args": {"embed_dim": 32}}),
    WrapperCase("qianfan_ocr", "qwen3", {"head_dim": 16}, is_reversible=False),
    WrapperCase("qwen2_audio", "qwen2"),
    WrapperCase("granite_speech", "granite", {"attention_multiplier": 0.1}),
    WrapperCase("qwen2_5_omni_thinker", "qwen2_5_omni_text", {"rope_parameters": MROPE}, name="qwen2_5_omni"),
    WrapperCase(
        "qwen3_omni_moe_thinker", "qwen3_omni_moe_text", {"head_dim": 16, "rope_parameters": MROPE},
        name="qwen3_omni_moe",
    ),
)  # fmt: skip


def check_text(case: WrapperCase, folder: Path, *, as_published: bool) -> float:
    """Compare the language model inside with transformers' whole model given text alone: the largest error.

    as_published: tensors are called as in checkpoints of earlier versions, else as the model itself calls them.
    """
    model = make_wrapper(case)
    model.save_pretrained(folder, save_original_format=as_published)
    sequences = make_sequences(Case(case.model_type, case.text_type, {}))
    with torch.inference_mode():
        whole = model.language_model if case.model_type == "llama4" else model  # whose class fails without a picture
        expected = [whole(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in sequences]
    got = load_folder(folder).logits(sequences, chunk=5, block_size=4, seed=1)
    return max(assert_close(logits, want) for logits, want in zip(got, expected, strict=True))


def make_wrapper(case: WrapperCase) -> Any:
    """A tiny random model of transformers' own class."""
    from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText, AutoModelForMultimodalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    default = CONFIG_MAPPING[case.model_type]()
    text = AutoConfig.for_model(case.text_type, **tiny_sizes(Case("", case.text_type, case.text))).to_dict()
    inside: dict[str, Any] = {"text_config": text}
    for key in [name for name in default.sub_configs if name.endswith("_config") and name != "text_config"]:
        tower = getattr(default, key)
        if tower is not None and not isinstance(tower, dict):
            sizes = {**TOWER_SIZES, **case.tower_sizes}
            known = {name: size for name, size in sizes.items() if hasattr(tower, name)}
            inside[key] = {"model_type": tower.model_type, **known}
    config = CONFIG_MAPPING[case.model_type](**{**inside, **case.config})
    auto: Any = AutoModelForImageTextToText
    if type(config) not in auto._model_mapping:
        auto = AutoModelForMultimodalLM
    with patch.object(AutoModel, "from_config", partial(_tower, AutoModel.from_config)):
        model = auto.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    randomise(model)
    model.tie_weights()
    return model


def _tower(from_config: Callable[..., Any], config: Any, **options: Any) -> Any:
    """What transformers makes of a part's config; in the place of towers that only timm has, any module."""
    from transformers import Gemma3nVisionConfig, TimmWrapperConfig

    timm = (Gemma3nVisionConfig, TimmWrapperConfig)
    return torch.nn.Linear(4, 4) if type(config) in timm else from_config(config, **options)
