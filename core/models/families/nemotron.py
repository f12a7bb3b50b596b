"""Nemotron 3 and 4, Minitron: layer norms stored minus one, half of each head turned, relu squared."""

import dataclasses

from ..config import HFConfig
from ..llama_like import layer_norm, llama_like, replace_mlp, with_biases
from ..name_tables import LLAMA_NAMES
from ..spec import ModelSpec

WEIGHTS = LLAMA_NAMES


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama with a plain feed-forward block; early files say rope_percent."""
    config = config.with_defaults(
        max_position_embeddings=4096, hidden_act="relu2", partial_rotary_factor=config.get("rope_percent", 0.5)
    )
    norm = dataclasses.replace(layer_norm(config, "norm_eps"), plus_one=True)
    spec = replace_mlp(llama_like(config, norm=norm), gated=False)
    attention, mlp = config.boolean("attention_bias", False), config.boolean("mlp_bias", False)
    return with_biases(spec, attention=attention, mlp=mlp)
