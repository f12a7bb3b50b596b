"""Phi-3.5-MoE: layer norms, experts by sparse mixer, LongRoPE with stated attention factors."""

import dataclasses

from ...errors import ModelError
from ..config import HFConfig
from ..llama_like import FULL, SLIDING, layer_norm, llama_like, with_biases
from ..mixtures import read_experts, replace_with_experts
from ..name_tables import BLOCK_SPARSE_EXPERTS, llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names(BLOCK_SPARSE_EXPERTS)


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama with all of that; the epsilon of its layer norms is called rms_norm_eps."""
    config = config.with_defaults(
        num_key_value_heads=8, max_position_embeddings=131072, hidden_act="silu", sliding_window=None,
        rope_theta=1000000.0, num_local_experts=16, num_experts_per_tok=2,
    )  # fmt: skip
    kind = SLIDING if config.integer("sliding_window", null=0) else FULL
    config = _with_attention_factor(config)
    spec = llama_like(config, layer_types=[kind] * config.num_layers(), norm=layer_norm(config, "rms_norm_eps"))
    spec = with_biases(spec, attention=config.boolean("attention_bias", False))
    moe = read_experts(config, size="intermediate_size", score="sparsemixer", renormalize=False)
    return dataclasses.replace(replace_with_experts(spec, moe), lm_head_bias=config.boolean("lm_head_bias", False))


def _with_attention_factor(config: HFConfig) -> HFConfig:
    scaling = dict(config.mapping("rope_scaling") or config.mapping("rope_parameters"))
    short, long = scaling.get("short_mscale"), scaling.get("long_mscale")
    if short is None:
        return config
    if short != long:
        raise ModelError(f"short_mscale ({short}) and long_mscale ({long}) in {config.file} must be equal")
    scaling = {"rope_theta": config.get("rope_theta"), **scaling, "attention_factor": short}
    return config.replace(rope_scaling=None, rope_parameters=scaling)
