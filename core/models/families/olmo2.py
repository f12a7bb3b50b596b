"""OLMo 2: norms after the blocks instead of before, and over all heads of query and key at once."""

from collections.abc import Sequence

from ..config import HFConfig
from ..llama_like import llama_like, replace_attention, replace_layers
from ..name_tables import SANDWICH, llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names(SANDWICH)


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama with its norms moved."""
    return olmo2_like(config)


def olmo2_like(config: HFConfig, layer_types: Sequence[str] = ()) -> ModelSpec:
    """What OLMo 2 and 3 share."""
    config = config.with_defaults(max_position_embeddings=2048, hidden_act="silu")
    spec = llama_like(config, layer_types=layer_types, rms_norm_eps=1e-5)
    bias = config.boolean("attention_bias", False)
    spec = replace_attention(spec, qk_norm=spec.norm, qk_norm_over="all", qkv_bias=bias, o_bias=bias)
    return replace_layers(spec, lambda layer: {"pre_norm": False, "post_norm": True})
