"""Ministral 3: Llama with YaRN, whose queries grow with the position."""

from ..config import HFConfig
from ..llama_like import FULL, SLIDING, llama_like, replace_attention
from ..name_tables import LLAMA_NAMES
from ..spec import ModelSpec

WEIGHTS = LLAMA_NAMES
_ROPE = {
    "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama; `llama_4_scaling_beta` among the rope parameters says how fast queries grow."""
    config = config.with_defaults(
        num_key_value_heads=8, head_dim=128, max_position_embeddings=262144, hidden_act="silu", rope_parameters=_ROPE
    )
    kind = SLIDING if config.integer("sliding_window", 0, null=0) else FULL
    spec = llama_like(config, layer_types=[kind] * config.num_layers(), rms_norm_eps=1e-5)
    rope = config.rope_parameters()
    return replace_attention(
        spec,
        temperature_scale=rope.number("llama_4_scaling_beta", 0.0),
        temperature_length=rope.size("original_max_position_embeddings"),
    )
