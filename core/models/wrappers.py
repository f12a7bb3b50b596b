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
    "glm4v_text": "glm46v",
    "granite": "granite_speech",
    "hyperclovax": "hyperclovax_vision_v2",
    "internlm2": "internvl_chat",
    "lfm2": "lfm2_vl",
    "llama": "deepseek_vl idefics3 janus llava llava_next llava_next_video smolvlm video_llava vipllava voxtral",
    "mistral": "idefics2 mistral3",
    "mllama_text_model": "mllama",
    "persimmon": "fuyu",
    "phi3": "phi4_multimodal",
    "qwen2": "got_ocr2 internvl llava_onevision ovis2 qwen2_audio video_llama_3",
    "qwen2_5_omni_text": "qwen2_5_omni_thinker",
    "qwen3": "lighton_ocr",
    "qwen3_omni_moe_text": "qwen3_omni_moe_thinker",
}
"""The language models of others."""
WRAPPERS = {
    **{name: f"{name}_text" for name in _OWN_TEXT},
    **{outer: inner for inner, outers in _AROUND.items() for outer in outers.split()},
}
"""model_type -> the language model's, where its config does not say."""
_UNREAD = (
    "aligner audio_tokenizer audio_tower code2wav connector embed_audio embed_tokens_extend embed_vision encoder "
    "generation_aligner generation_embeddings generation_head image_newline image_tower mlp1 mlp_AR mm_projector mtp "
    "multi_modal_projector projector talker token2wav video_tower vision_embed_tokens vision_embedder vision_encoder "
    "vision_model vision_projection vision_projector vision_tokenizer vision_tower visual "
    "visual_embeddings_table vqmodel"
).split()
"""Modules that a language model does without."""
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


def text_names(names: NameTable, *, is_alone: bool = True) -> NameTable:
    """The language model's table for names inside such a checkpoint, as older and newer versions of transformers
    spell them; is_alone: nothing else is read. A head is the embedding where the checkpoint has none, since files
    disagree with themselves on that.
    """
    entries = dict(names.entries)
    head, embedding = (_stored(entries[f"{name}.weight"]) for name in ("lm_head", "embed_tokens"))
    entries["lm_head.weight"] = dataclasses.replace(head, copies=(*head.copies, embedding.name, *embedding.also))
    inside = r"^(?:model\.)?(?:language_model|text_model)\."
    return dataclasses.replace(
        names,
        entries=entries,
        ignore=(*names.ignore, rf"^(?:model\.)?(?:{'|'.join(_UNREAD)})(?:\.|$)") if is_alone else names.ignore,
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
