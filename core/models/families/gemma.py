"""Gemma 1: norm weights stored minus one, scaled embeddings, a gated tanh GELU."""

import dataclasses

from ...errors import ModelError
from ..config import HFConfig
from ..llama_like import llama_like, with_biases
from ..name_tables import LLAMA_NAMES
from ..spec import ModelSpec

WEIGHTS = LLAMA_NAMES


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama; the head is tied."""
    if config.get("use_bidirectional_attention"):
        raise ModelError(f"{config.file} asks for bidirectional attention; only causal is served")
    config = config.with_defaults(
        num_key_value_heads=16, head_dim=256, max_position_embeddings=8192, hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    )  # fmt: skip
    if config.get("hidden_act") == "gelu":  # what the first release said, and did not mean
        config = config.replace(hidden_act="gelu_pytorch_tanh")
    spec = with_biases(llama_like(config), attention=config.boolean("attention_bias", False))
    norm = dataclasses.replace(spec.norm, plus_one=True)
    return dataclasses.replace(spec, norm=norm, embed_scale=spec.hidden_size**0.5)
