"""Helium: Llama with interleaved rope."""

from ..config import HFConfig
from ..llama_like import llama_like, replace_attention, replace_mlp, turn_pairs
from ..name_tables import LLAMA_NAMES
from ..spec import ModelSpec

WEIGHTS = LLAMA_NAMES


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama; o_proj never has a bias."""
    config = config.with_defaults(
        num_key_value_heads=20, head_dim=128, max_position_embeddings=4096, hidden_act="silu", rope_theta=100000.0
    )
    spec = replace_mlp(llama_like(config, rms_norm_eps=1e-8), bias=config.boolean("mlp_bias", False))
    return turn_pairs(replace_attention(spec, qkv_bias=config.boolean("attention_bias", False)))
