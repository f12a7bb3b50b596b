"""InternLM3: Llama, whose linears may have biases."""

from ..config import HFConfig
from ..llama_like import llama_like, with_biases
from ..name_tables import LLAMA_NAMES
from ..spec import ModelSpec

WEIGHTS = LLAMA_NAMES


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama; its own names of the bias flags are `qkv_bias` and `bias`."""
    config = config.alias(attention_bias="qkv_bias", mlp_bias="bias")
    config = config.with_defaults(
        num_key_value_heads=2, head_dim=128, max_position_embeddings=32768, hidden_act="silu"
    )
    spec = llama_like(config, rms_norm_eps=1e-5)
    attention, mlp = config.boolean("attention_bias", False), config.boolean("mlp_bias", False)
    return with_biases(spec, attention=attention, mlp=mlp)
