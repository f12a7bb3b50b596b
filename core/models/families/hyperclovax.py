"""HyperCLOVA X SEED: Granite with norms behind the blocks too, and logits that are multiplied."""

import dataclasses

from ..config import HFConfig
from ..llama_like import replace_layers
from ..name_tables import llama_names
from ..spec import ModelSpec
from . import granite

WEIGHTS = llama_names({"attn_post_norm": "post_norm1", "mlp_post_norm": "post_norm2"})


def to_spec(config: HFConfig) -> ModelSpec:
    """Granite; scores are scaled as Llama's unless the config says otherwise."""
    head_dim = config.size("head_dim", config.size("hidden_size") // config.size("num_attention_heads"))
    scale = head_dim**-0.5
    scale = config.number("attention_multiplier", scale, null=scale)
    spec, has_norms = (
        granite.to_spec(config.replace(attention_multiplier=scale)),
        config.boolean("use_post_norm", True),
    )
    spec = replace_layers(spec, lambda layer: {"post_norm": has_norms})
    return dataclasses.replace(spec, logit_scale=config.number("logits_scaling", 1.0))
