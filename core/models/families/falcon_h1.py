"""Falcon-H1: attention and Mamba-2 side by side in each layer, multipliers everywhere."""

import dataclasses

from ..config import HFConfig
from ..hybrids import read_mamba2
from ..llama_like import llama_like, replace_attention, replace_layers, replace_mlp, with_biases
from ..spec import ModelSpec
from . import bamba

WEIGHTS = bamba.WEIGHTS


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama with a mixer beside attention; the multiplier of keys is one of scores."""
    config = config.with_defaults(num_key_value_heads=8, max_position_embeddings=8192, hidden_act="silu")
    size = config.integer("mamba_d_ssm", 1024, null=0) or int(
        config.positive("mamba_expand", 2) * config.size("hidden_size")
    )
    config = config.replace(mamba_d_head=size // config.size("mamba_n_heads", 128))
    spec = llama_like(config, rms_norm_eps=1e-5)
    multipliers = config.numbers("ssm_multipliers", 5) if config.get("ssm_multipliers") else ()
    mixer = dataclasses.replace(
        read_mamba2(config, spec.norm if config.boolean("mamba_rms_norm", False) else None),
        norm_first=config.boolean("mamba_norm_before_gate", True),
        out_bias=config.boolean("projectors_bias", False),
        multipliers=multipliers if set(multipliers) != {1.0} else (),
        in_scale=config.number("ssm_in_multiplier", 1.0),
        out_scale=config.number("ssm_out_multiplier", 1.0),
    )
    gate, down = config.numbers("mlp_multipliers", 2) if config.get("mlp_multipliers") else (1.0, 1.0)
    attention, mlp = config.boolean("attention_bias", False), config.boolean("mlp_bias", False)
    spec = replace_mlp(with_biases(spec, attention=attention, mlp=mlp), gate_scale=gate, out_scale=down)
    spec = replace_attention(
        spec,
        scale=spec.layers[0].attn.scale * config.number("key_multiplier", 1.0),
        in_scale=config.number("attention_in_multiplier", 1.0),
        out_scale=config.number("attention_out_multiplier", 1.0),
    )
    return dataclasses.replace(
        replace_layers(spec, lambda layer: {"mixer": mixer}),
        embed_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=config.number("lm_head_multiplier", 1.0),
    )
