"""Tiny random checkpoints of every family, made by transformers: the oracle's own files."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from golden_cases import CASES
from paged_model import make_checkpoint

COMMON: dict[str, Any] = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    tie_word_embeddings=False,
)

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(),
    "mistral": dict(sliding_window=6),
    "qwen2": dict(),
    "qwen3": dict(),
    "gemma2": dict(
        sliding_window=6, query_pre_attn_scalar=16, attn_logit_softcapping=20.0, final_logit_softcapping=10.0
    ),
    "gemma3_text": dict(sliding_window=6, query_pre_attn_scalar=16),
    "phi3": dict(),
    "gpt2": dict(n_embd=64, n_layer=4, n_head=4, n_positions=256, n_inner=96),
}


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """A transformers config of a few thousand parameters; gpt2 has names of its own for the sizes."""
    common: Mapping[str, Any] = COMMON
    if model_type == "gpt2":
        common = {
            k: v for k, v in COMMON.items() if k.endswith("token_id") or k in ("vocab_size", "tie_word_embeddings")
        }
    if model_type in ("qwen2", "phi3"):
        common = {k: v for k, v in COMMON.items() if k != "head_dim"}
    return CONFIG_MAPPING[model_type](**{**common, **FAMILIES[model_type], **overrides})


def tiny_model(model_type: str, *, seed: int = 0, attn: str = "eager", **overrides: Any) -> PreTrainedModel:
    """A model with every weight random: zero biases and unit norms would hide mistakes."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        tiny_config(model_type, **overrides), attn_implementation=attn, dtype=torch.float32
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            is_weight = "norm" in name or "ln_" in name
            zero_centred = is_weight and bool((parameter.data == 0).all())
            offset = 1.0 if is_weight and name.endswith("weight") and not zero_centred else 0.0
            value = offset + 0.2 * noise
        elif "embed" in name or "wte" in name or "wpe" in name:
            value = 0.5 * noise
        else:
            gain = 3.0 if any(word in name for word in ("q_proj", "k_proj", "qkv", "c_attn")) else 1.0
            fan_in = parameter.shape[0] if "gpt2" in model_type else parameter.shape[-1]
            value = noise * gain / fan_in**0.5
        parameter.data.copy_(value)
    return model  # type: ignore[no-any-return]


def save_tiny(folder: Path, model_type: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Make a tiny model, save it as transformers does, and return it as the oracle."""
    model = tiny_model(model_type, seed=seed, **overrides)
    model.save_pretrained(folder)
    return model


def save_golden_case(folder: Path, name: str) -> PreTrainedModel:
    """Save the tiny model of one of golden_cases, with the vocabulary of COMMON, and return it as the oracle."""
    case = next(case for case in CASES if case.name == name)
    rows = {key: COMMON["vocab_size"] for key in ("vocab_size", *case.config) if key.startswith("vocab_size")}
    make_checkpoint(replace(case, config={**case.config, **rows}), folder)
    attention = "eager" if case.has_eager else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=torch.float32)
    return model.eval()  # type: ignore[no-any-return, no-untyped-call]


def greedy_tokens(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """What transformers generates greedily, without stopping at an end of sequence."""
    with torch.inference_mode():
        out = model.generate(  # type: ignore[operator]
            torch.tensor([prompt]),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens
