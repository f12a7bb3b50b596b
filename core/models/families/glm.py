"""GLM-4 9B (model_type glm): Llama with qkv biases, packed gate and up, and half of each head turned in pairs."""

from ..config import HFConfig
from ..llama_like import llama_like, replace_attention, turn_pairs
from ..name_tables import llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names({"mlp.gate_up_proj": "mlp.gate_up_proj"})


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama; o_proj never has a bias."""
    config = config.with_defaults(
        num_key_value_heads=2, head_dim=128, max_position_embeddings=131072, hidden_act="silu",
        partial_rotary_factor=0.5,
    )  # fmt: skip
    spec = turn_pairs(llama_like(config, rms_norm_eps=1.5625e-07))
    return replace_attention(spec, qkv_bias=config.boolean("attention_bias", True))
