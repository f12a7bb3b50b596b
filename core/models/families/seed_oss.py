"""Seed-OSS: Llama with biases on query, key and value."""

from ..config import HFConfig
from ..llama_like import llama_like, replace_attention, replace_mlp
from ..name_tables import LLAMA_NAMES
from ..spec import ModelSpec

WEIGHTS = LLAMA_NAMES


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama; each bias has a flag of its own."""
    config = config.with_defaults(
        num_key_value_heads=8, head_dim=128, max_position_embeddings=524288, hidden_act="silu"
    )
    spec = replace_mlp(llama_like(config), bias=config.boolean("mlp_bias", False))
    o_bias = config.boolean("attention_out_bias", False)
    return replace_attention(spec, qkv_bias=config.boolean("attention_bias", True), o_bias=o_bias)
