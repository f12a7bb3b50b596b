"""Multimodal checkpoints served as the language model inside them: what is taken out, renamed and left behind."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..weights.names import NameTable, Stored
from .config import HFConfig

_INSIDE = ("thinker_config", "text_config", "llm_config", "language_config")
"""Keys of config.json under which the language model's config lies, the outer one first."""
_LLAVA = "vision_tower|multi_modal_projector"
_IDEFICS = "vision_model|connector"
_QWEN = "visual|audio_tower|talker|token2wav|code2wav"
WRAPPERS: Mapping[str, tuple[str, str]] = {
    "apertus1p5": ("apertus1p5_text", "vision_tokenizer|audio_tokenizer"),
    "aria": ("aria_text", _LLAVA),
    "aya_vision": ("cohere2", _LLAVA),
    "cohere_compass": ("cohere_compass_text", "visual"),
    "cohere2_vision": ("cohere2", _LLAVA),
    "deepseek_vl": ("llama", "vision_model|aligner"),
    "emu3": ("emu3_text_model", "vqmodel"),
    "exaone4_5": ("exaone4", "visual|mtp"),
    "fuyu": ("persimmon", "vision_embed_tokens"),
    "gemma3": ("gemma3_text", _LLAVA),
    "gemma3n": ("gemma3n_text", "vision_tower|audio_tower|embed_vision|embed_audio"),
    "gemma4": ("gemma4_text", "vision_tower|audio_tower|embed_vision|embed_audio"),
    "gemma4_unified": ("gemma4_unified_text", "vision_embedder|audio_tower|embed_vision|embed_audio"),
    "glm46v": ("glm4v_text", "visual"),
    "glm4v": ("glm4v_text", "visual"),
    "glm4v_moe": ("glm4v_moe_text", "visual"),
    "glm_ocr": ("glm_ocr_text", "visual"),
    "got_ocr2": ("qwen2", _LLAVA),
    "granite_docling": ("granite_docling_text", _IDEFICS),
    "granite_speech": ("granite", "encoder|projector"),
    "hyperclovax_vision_v2": ("hyperclovax", "vision_model|(vision_|mm_)?projector"),
    "idefics2": ("mistral", _IDEFICS),
    "idefics3": ("llama", _IDEFICS),
    "internvl": ("qwen2", _LLAVA),
    "internvl_chat": ("internlm2", "vision_model|mlp1"),
    "janus": ("llama", "vision_model|aligner|vqmodel|generation_(embeddings|aligner|head)"),
    "kimi_k25": ("deepseek_v3", "vision_tower|mm_projector"),
    "kimi_vl": ("deepseek_v3", _LLAVA),
    "lfm2_vl": ("lfm2", _LLAVA),
    "lighton_ocr": ("qwen3", "vision_encoder|vision_projection"),
    "llama4": ("llama4_text", "vision_model|multi_modal_projector"),
    "llava": ("llama", _LLAVA),
    "llava_next": ("llama", f"{_LLAVA}|image_newline"),
    "llava_next_video": ("llama", f"{_LLAVA}|image_newline"),
    "llava_onevision": ("qwen2", f"{_LLAVA}|image_newline"),
    "mistral3": ("mistral", _LLAVA),
    "mllama": ("mllama_text_model", "vision_model|multi_modal_projector"),
    "ovis2": ("qwen2", "vision_tower|visual_embeddings_table"),
    "paddleocr_vl": ("paddleocr_vl_text", "visual|projector|mlp_AR"),
    "paligemma": ("gemma", _LLAVA),
    "phi4_multimodal": ("phi3", "embed_tokens_extend"),
    "qwen2_5_omni": ("qwen2_5_omni_text", _QWEN),
    "qwen2_5_omni_thinker": ("qwen2_5_omni_text", _QWEN),
    "qwen2_5_vl": ("qwen2_5_vl_text", _QWEN),
    "qwen2_audio": ("qwen2", "audio_tower|multi_modal_projector"),
    "qwen2_vl": ("qwen2_vl_text", _QWEN),
    "qwen3_5": ("qwen3_5_text", _QWEN),
    "qwen3_5_moe": ("qwen3_5_moe_text", _QWEN),
    "qwen3_omni_moe": ("qwen3_omni_moe_text", _QWEN),
    "qwen3_omni_moe_thinker": ("qwen3_omni_moe_text", _QWEN),
    "qwen3_vl": ("qwen3_vl_text", _QWEN),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", _QWEN),
    "shieldgemma2": ("gemma3_text", _LLAVA),
    "smolvlm": ("llama", _IDEFICS),
    "video_llama_3": ("qwen2", "vision_model|projector"),
    "video_llava": ("llama", "video_tower|image_tower|multi_modal_projector"),
    "vipllava": ("llama", _LLAVA),
    "voxtral": ("llama", "audio_tower|multi_modal_projector"),
}
"""model_type -> the language model's, where its config does not say; an expression for modules it does without."""
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
    default, _ = WRAPPERS[config.model_type.replace("-", "_")]
    inner = config
    for key in _INSIDE:
        if inside := inner.mapping(key):
            inner = HFConfig(inside, file=f"{key} of {config.file}")
    if inner is config:
        return config.replace(model_type=default)
    inner = inner.with_defaults(model_type=default, dtype=config.dtype)
    sizes: Mapping[str, Any] = dict(zip(_SIZE_KEYS, _SIZES.get(inner.model_type, ()), strict=False))
    return _with_ties(inner.with_defaults(**sizes), config)


def text_names(names: NameTable, model_type: str, *, is_alone: bool = True) -> NameTable:
    """The language model's table for names inside such a checkpoint, as older and newer versions of transformers
    spell them; is_alone: nothing else is read. A head is the embedding where the checkpoint has none, since files
    disagree with themselves on that.
    """
    _, unread = WRAPPERS[model_type.replace("-", "_")]
    entries = dict(names.entries)
    head, embedding = (_stored(entries[f"{name}.weight"]) for name in ("lm_head", "embed_tokens"))
    entries["lm_head.weight"] = dataclasses.replace(head, copies=(*head.copies, embedding.name, *embedding.also))
    inside = r"^(?:model\.)?(?:language_model|text_model)\."
    return dataclasses.replace(
        names,
        entries=entries,
        ignore=(*names.ignore, rf"^(?:model\.)?(?:{unread})(?:\.|$)") if is_alone else names.ignore,
        renames=(
            (r"^thinker\.", ""),
            (rf"{inside}(?={names.base_prefix}|lm_head\.)", ""),
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
