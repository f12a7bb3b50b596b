"""Qwen3, dense: Llama whose query and key heads are normalised."""

from ..config import HFConfig
from ..llama_like import llama_like, replace_attention, windowed_layer_types
from ..name_tables import LLAMA_NAMES
from ..spec import ModelSpec

WEIGHTS = LLAMA_NAMES


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama with a norm per head; head_dim is stated, not hidden_size / num_heads."""
    config = config.with_defaults(
        head_dim=128,
        num_key_value_heads=32,
        max_position_embeddings=32768,
        hidden_act="silu",
        sliding_window=4096,
        max_window_layers=28,
    )
    spec = llama_like(config, layer_types=windowed_layer_types(config))
    bias = config.boolean("attention_bias", False)
    return replace_attention(spec, qk_norm=spec.norm, qkv_bias=bias, o_bias=bias)
