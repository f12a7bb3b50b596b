"""Jais 2: layer norms, biases everywhere, relu squared."""

from ..config import HFConfig
from ..llama_like import layer_norm, llama_like, replace_mlp, with_biases
from ..name_tables import LLAMA_NAMES
from ..spec import ModelSpec

WEIGHTS = LLAMA_NAMES


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama's attention with a plain feed-forward block."""
    config = config.with_defaults(max_position_embeddings=8192, hidden_act="relu2")
    spec = replace_mlp(llama_like(config, norm=layer_norm(config)), gated=False)
    attention, mlp = config.boolean("attention_bias", True), config.boolean("mlp_bias", True)
    return with_biases(spec, attention=attention, mlp=mlp)
