"""Granite 3 and 4 (dense): Llama with multipliers on embeddings, scores, blocks and logits."""

import dataclasses

from ..config import HFConfig
from ..llama_like import llama_like, replace_attention, replace_layers, with_biases
from ..name_tables import LLAMA_NAMES
from ..spec import ModelSpec

WEIGHTS = LLAMA_NAMES


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama with multipliers and flags for biases."""
    attention, mlp = config.boolean("attention_bias", False), config.boolean("mlp_bias", False)
    return with_biases(granite_like(config), attention=attention, mlp=mlp)


def granite_like(config: HFConfig) -> ModelSpec:
    """What all Granites share."""
    config = config.with_defaults(max_position_embeddings=2048, hidden_act="silu")
    residual = config.number("residual_multiplier", 1.0)
    spec = replace_attention(llama_like(config), scale=config.number("attention_multiplier", 1.0))
    return dataclasses.replace(
        replace_layers(spec, lambda layer: {"residual_scale": residual}),
        embed_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=1 / config.positive("logits_scaling", 1.0),
    )
