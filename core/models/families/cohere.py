"""Command R: parallel blocks under one layer norm without bias, interleaved rope, scaled logits."""

import dataclasses
from collections.abc import Sequence

from ...weights.names import Stored
from ..config import HFConfig
from ..llama_like import layer_norm, llama_like, replace_attention, replace_layers, turn_pairs
from ..name_tables import llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names(
    {
        "attn.q_norm": Stored(name="self_attn.q_norm", stacked=True),
        "attn.k_norm": Stored(name="self_attn.k_norm", stacked=True),
    }
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Command R; R+ normalises each head of query and key with a weight of its own."""
    config = config.with_defaults(rope_theta=500000.0)
    spec = cohere_like(config)
    if not config.boolean("use_qk_norm", False):
        return spec
    return replace_attention(spec, qk_norm=spec.norm, qk_norm_over="heads")


def cohere_like(config: HFConfig, layer_types: Sequence[str] = ()) -> ModelSpec:
    """What Command R and A share."""
    config = config.with_defaults(max_position_embeddings=8192, hidden_act="silu", tie_word_embeddings=True)
    spec = llama_like(config, layer_types=layer_types, norm=layer_norm(config, bias=False))
    spec = replace_layers(turn_pairs(spec), lambda layer: {"parallel": True, "shared_norm": True})
    bias = config.boolean("attention_bias", False)
    spec = replace_attention(spec, qkv_bias=bias, o_bias=bias)
    return dataclasses.replace(spec, logit_scale=config.number("logit_scale", 0.0625))
