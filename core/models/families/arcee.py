"""Arcee AFM: Llama with a plain feed-forward block, relu squared."""

from ..config import HFConfig
from ..llama_like import llama_like, replace_mlp, with_biases
from ..name_tables import LLAMA_NAMES
from ..spec import ModelSpec

WEIGHTS = LLAMA_NAMES


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama; up and down only."""
    config = config.with_defaults(max_position_embeddings=4096, hidden_act="relu2")
    spec = replace_mlp(llama_like(config, rms_norm_eps=1e-5), gated=False)
    attention, mlp = config.boolean("attention_bias", False), config.boolean("mlp_bias", False)
    return with_biases(spec, attention=attention, mlp=mlp)
