"""Qwen1.5, Qwen2 and Qwen2.5: Llama with biases on query, key and value."""

from ..config import HFConfig
from ..llama_like import llama_like, replace_attention, windowed_layer_types
from ..name_tables import LLAMA_NAMES
from ..spec import ModelSpec

WEIGHTS = LLAMA_NAMES


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama with qkv biases; the upper layers may slide."""
    config = config.with_defaults(
        num_key_value_heads=32,
        max_position_embeddings=32768,
        hidden_act="silu",
        sliding_window=4096,
        max_window_layers=28,
    )
    spec = llama_like(config, layer_types=windowed_layer_types(config))
    return replace_attention(spec, qkv_bias=True)
