"""Llama 1 to 3.2, and what calls itself llama: SmolLM2, Yi, Vicuna and many more."""

import dataclasses

from ..config import HFConfig
from ..llama_like import llama_like, replace_layers
from ..name_tables import LLAMA_NAMES
from ..spec import ModelSpec

WEIGHTS = LLAMA_NAMES


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama, whose linears may have biases."""
    spec = llama_like(config.with_defaults(max_position_embeddings=2048, hidden_act="silu"))
    attention_bias, mlp_bias = config.boolean("attention_bias", False), config.boolean("mlp_bias", False)
    return replace_layers(
        spec,
        lambda layer: {
            "attn": dataclasses.replace(layer.attn, qkv_bias=attention_bias, o_bias=attention_bias),
            "mlp": dataclasses.replace(layer.mlp, bias=mlp_bias),
        },
    )
