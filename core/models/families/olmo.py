"""OLMo 1: layer norms without weights; query, key and value may be clipped."""

from ..config import HFConfig
from ..llama_like import llama_like, replace_attention
from ..name_tables import LLAMA_NAMES
from ..spec import ModelSpec, NormSpec

WEIGHTS = LLAMA_NAMES


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama with nothing learned in its norms."""
    config = config.with_defaults(max_position_embeddings=2048, hidden_act="silu")
    spec = llama_like(config, norm=NormSpec(kind="layer", eps=1e-5, weight=False))
    bias = config.boolean("attention_bias", False)
    return replace_attention(spec, clip_qkv=config.number("clip_qkv", 0.0, null=0.0), qkv_bias=bias, o_bias=bias)
