"""Phi-1, 1.5 and 2: parallel blocks under one layer norm, partial rope, biases everywhere, on the head too."""

import dataclasses

from ..config import HFConfig
from ..llama_like import layer_norm, llama_like, replace_attention, replace_layers, replace_mlp, with_biases
from ..name_tables import llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names(
    {
        "attn.o_proj": "self_attn.dense",
        "attn.q_norm": "self_attn.q_layernorm",
        "attn.k_norm": "self_attn.k_layernorm",
        "mlp.up_proj": "mlp.fc1",
        "mlp.down_proj": "mlp.fc2",
        "final_norm": "model.final_layernorm",
    }
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama's walk with all of that."""
    config = config.with_defaults(max_position_embeddings=2048, hidden_act="gelu_new", partial_rotary_factor=0.5)
    spec = with_biases(llama_like(config, norm=layer_norm(config)), attention=True, mlp=True)
    if config.boolean("qk_layernorm", False):
        spec = replace_attention(spec, qk_norm=spec.norm)
    spec = replace_layers(replace_mlp(spec, gated=False), lambda layer: {"parallel": True, "shared_norm": True})
    return dataclasses.replace(spec, lm_head_bias=True)
