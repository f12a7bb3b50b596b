"""Gemma 2: norms around both blocks, scaled embeddings, soft caps, every other layer slides."""

import dataclasses

from ...errors import ModelError
from ..config import HFConfig
from ..llama_like import FULL, SLIDING, llama_like, replace_layers
from ..name_tables import GEMMA_NAMES
from ..spec import ModelSpec

WEIGHTS = GEMMA_NAMES


def to_spec(config: HFConfig) -> ModelSpec:
    """Norm weights are stored minus one; scores are scaled by query_pre_attn_scalar, not by head_dim."""
    config = config.with_defaults(
        max_position_embeddings=8192, sliding_window=4096, attn_logit_softcapping=50.0, final_logit_softcapping=30.0
    )
    num_layers = config.num_layers()
    return gemma_like(config, [FULL if i % 2 else SLIDING for i in range(num_layers)])


def gemma_like(config: HFConfig, layer_types: list[str]) -> ModelSpec:
    """What Gemma 2 and 3 share. layer_types: where the config lists none."""
    if config.get("use_bidirectional_attention"):
        raise ModelError(
            f"{config.file} asks for bidirectional attention (an embedding model); only causal is served"
        )
    config = config.with_defaults(
        num_key_value_heads=4, head_dim=256, hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True
    )
    listed = config.texts("layer_types") or layer_types
    spec = llama_like(config, layer_types=listed, activation_key="hidden_activation")
    bias = config.boolean("attention_bias", False)
    scale = config.size("query_pre_attn_scalar", 256) ** -0.5
    softcap = config.number("attn_logit_softcapping", 0.0, null=0.0)
    spec = replace_layers(
        spec,
        lambda layer: {
            "post_norm": True,
            "attn": dataclasses.replace(layer.attn, scale=scale, softcap=softcap, qkv_bias=bias, o_bias=bias),
        },
    )
    return dataclasses.replace(
        spec,
        norm=dataclasses.replace(spec.norm, plus_one=True),
        embed_scale=spec.hidden_size**0.5,
        logit_softcap=config.number("final_logit_softcapping", 0.0, null=0.0),
    )
