"""StableLM 2 and 3B: layer norms, a quarter of each head turned; the 12B has parallel blocks and normalised heads."""

import dataclasses

from ..config import HFConfig
from ..llama_like import layer_norm, llama_like, replace_attention, replace_layers
from ..name_tables import llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names(
    {
        "attn.q_norm.{j}": "self_attn.q_layernorm.norms.{j}",
        "attn.k_norm.{j}": "self_attn.k_layernorm.norms.{j}",
    }
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama with other norms; a parallel layer has one."""
    config = config.with_defaults(max_position_embeddings=4096, hidden_act="silu", partial_rotary_factor=0.25)
    spec = llama_like(config, norm=layer_norm(config))
    spec = replace_attention(spec, qkv_bias=config.boolean("use_qkv_bias", False))
    if config.boolean("qk_layernorm", False):
        spec = replace_attention(spec, qk_norm=dataclasses.replace(spec.norm, bias=False), qk_norm_over="heads")
    if config.boolean("use_parallel_residual", False):
        spec = replace_layers(spec, lambda layer: {"parallel": True, "shared_norm": True})
    return spec
