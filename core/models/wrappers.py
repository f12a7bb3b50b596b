"""Multimodal checkpoints served as the language model inside them: what is taken out, renamed and left behind."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..weights.names import NameTable, Stored
from .config import HFConfig

_INSIDE = ("thinker_config", "text_config", "llm_config", "language_config")
"""Keys of config.json under which the language model's config lies, the outer one first."""
_OWN_TEXT = (
    "apertus1p5 aria cohere_compass gemma3 gemma3n gemma4 gemma4_unified glm4v glm4v_moe glm_ocr granite_docling "
    "llama4 paddleocr_vl qwen2_5_omni qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_omni_moe qwen3_vl "
    "qwen3_vl_moe"
).split()
"""Those whose language model is of a type of its own, which ends in _text."""
_AROUND: Mapping[str, str] = {
    "cohere2": "aya_vision cohere2_vision",
    "deepseek_v3": "kimi_k25 kimi_vl",
    "emu3_text_model": "emu3",
    "exaone4": "exaone4_5",
    "gemma": "paligemma",
    "gemma3_text": "shieldgemma2",
    "glm4v_text": "glm46v glmga",
    "granite": "granite_speech",
    "hyperclovax": "hyperclovax_vision_v2",
    "internlm2": "internvl_chat",
    "lfm2": "lfm2_vl",
    "lfm3": "lfm3_vl",
    "llama": "deepseek_vl deepseek_vl_hybrid idefics3 janus llava llava_next llava_next_video perception_lm smolvlm "
    "video_llava vipllava voxtral",
    "mistral": "idefics2 mistral3",
    "mllama_text_model": "mllama",
    "nemotron_h": "nemotron_h_omni",
    "persimmon": "fuyu",
    "phi3": "phi4_multimodal",
    "qwen2": "fast_vlm got_ocr2 internvl llava_onevision ovis2 qwen2_audio video_llama_3",
    "qwen2_5_omni_text": "qwen2_5_omni_thinker",
    "qwen3": "lighton_ocr qianfan_ocr",
    "qwen3_5_text": "minicpm_ocr minicpmv4_6 minicpmv4_7",
    "qwen3_omni_moe_text": "qwen3_omni_moe_thinker",
}
"""The language models of others."""
WRAPPERS = {
    **{name: f"{name}_text" for name in _OWN_TEXT},
    **{outer: inner for inner, outers in _AROUND.items() for outer in outers.split()},
}
"""model_type -> the language model's, where its config does not say."""
UNREAD: Mapping[str, str] = {
    "vision_tower multi_modal_projector": "aria aya_vision cohere2_vision fast_vlm gemma3 got_ocr2 internvl kimi_vl "
    "lfm2_vl lfm3_vl llava llava_next llava_next_video llava_onevision mistral3 paligemma perception_lm "
    "shieldgemma2 vipllava",
    "vision_tower multi_modal_projector vision_model mlp1": "qianfan_ocr",
    "vision_tower merger": "minicpm_ocr minicpmv4_6 minicpmv4_7",
    "visual": "cohere_compass exaone4_5 glm46v glm4v glm4v_moe glm_ocr glmga qwen2_5_vl qwen2_vl qwen3_vl "
    "qwen3_vl_moe",
    "visual mtp": "qwen3_5 qwen3_5_moe",
    "visual projector mlp_AR": "paddleocr_vl",
    "visual audio_tower": "qwen2_5_omni_thinker qwen3_omni_moe_thinker",
    "visual audio_tower talker token2wav": "qwen2_5_omni",
    "visual audio_tower talker code2wav": "qwen3_omni_moe",
    "image_newline": "llava_next llava_next_video llava_onevision",
    "image_tower video_tower multi_modal_projector": "video_llava",
    "audio_tower multi_modal_projector": "qwen2_audio voxtral",
    "audio_tower vision_tower embed_audio embed_vision": "gemma3n gemma4",
    "vision_embedder embed_audio embed_vision": "gemma4_unified",
    "vision_tokenizer audio_tokenizer": "apertus1p5",
    "vision_model connector": "granite_docling idefics2 idefics3 smolvlm",
    "vision_model projector vision_projector": "hyperclovax_vision_v2",
    "vision_model vision_encoder projector mm_projector": "video_llama_3",
    "vision_model multi_modal_projector": "llama4 mllama",
    "vision_model mlp1": "internvl_chat",
    "vision_model aligner": "deepseek_vl deepseek_vl_hybrid janus",
    "high_res_vision_model high_res_vision_neck high_res_vision_proj high_res_vision_alpha": "deepseek_vl_hybrid",
    "vision_model vision_final_layernorm multi_modal_projector mlp1 audio_tower embed_audio": "nemotron_h_omni",
    "vqmodel generation_aligner generation_embeddings generation_head": "janus",
    "vision_encoder vision_projection": "lighton_ocr",
    "vision_tower mm_projector": "kimi_k25",
    "vision_tower visual_embeddings_table": "ovis2",
    "encoder projector": "granite_speech",
    "embed_tokens_extend": "phi4_multimodal",
    "vision_embed_tokens": "fuyu",
    "vqmodel": "emu3",
}
"""Modules that a language model does without -> of which types."""
_SIZE_KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_SIZES: Mapping[str, tuple[int, ...]] = {
    "gemma3_text": (262208, 2304, 9216, 26, 8),
    "gemma4_text": (262144, 2304, 9216, 30, 8),
    "gemma4_unified_text": (262144, 2304, 9216, 30, 8),
    "llama": (32000, 4096, 11008, 32, 32),
    "mistral": (32000, 4096, 14336, 32, 32),
    "qwen2": (151936, 4096, 22016, 32, 32),
    "qwen3": (151936, 4096, 22016, 32, 32),
}
"""Sizes that a config inside another leaves out, because they are those of transformers' class."""


def text_config(config: HFConfig) -> HFConfig:
    """The config of the language model inside: under a key of its own, or among the others in older files."""
    default = WRAPPERS[config.model_type.replace("-", "_")]
    inner = config
    for key in _INSIDE:
        if inside := inner.mapping(key):
            inner = HFConfig(inside, file=f"{key} of {config.file}")
    if inner is config:
        return config.replace(model_type=default)
    inner = inner.with_defaults(model_type=default, dtype=config.dtype)
    sizes: Mapping[str, Any] = dict(zip(_SIZE_KEYS, _SIZES.get(inner.model_type, ()), strict=False))
    return _with_ties(inner.with_defaults(**sizes), config)


def text_names(names: NameTable, outer: str = "") -> NameTable:
    """The language model's table for names inside such a checkpoint, as older and newer versions of transformers
    spell them; outer: the type whose other modules are not read. A head is the embedding where the checkpoint has
    none, since files disagree with themselves on that.
    """
    unread = "|".join(" ".join(modules for modules, types in UNREAD.items() if outer in types.split()).split())
    entries = dict(names.entries)
    head, embedding = (_stored(entries[f"{name}.weight"]) for name in ("lm_head", "embed_tokens"))
    entries["lm_head.weight"] = dataclasses.replace(head, copies=(*head.copies, embedding.name, *embedding.also))
    inside = r"^(?:model\.)?(?:language_model|text_model)\."
    return dataclasses.replace(
        names,
        entries=entries,
        ignore=(*names.ignore, rf"^(?:model\.)?(?:{unread})(?:\.|$)") if unread else names.ignore,
        renames=(
            (r"^thinker\.", ""),
            (rf"{inside}(?={names.base_prefix}|model\.|lm_head\.)", ""),
            (inside, names.base_prefix),
            *names.renames,
        ),
    )


def _with_ties(inner: HFConfig, outer: HFConfig) -> HFConfig:
    """Whichever says that the head is the model's own is believed."""
    stated = [config.get("tie_word_embeddings") for config in (inner, outer)]
    if False in stated:
        return inner.replace(tie_word_embeddings=False)
    return inner.replace(tie_word_embeddings=True) if True in stated else inner


def _stored(entry: str | Stored) -> Stored:
    return entry if isinstance(entry, Stored) else Stored(name=entry)
