"""Laguna: experts by sigmoid, gated attention, and a number of heads of each layer's own."""

from functools import partial
from typing import Any

from ...errors import ModelError
from ..config import HFConfig
from ..dense_families import ATTN_FLAG
from ..llama_like import ByLayer, llama_like
from ..mixtures import read_experts, sparse_after
from ..name_tables import llama_names
from ..spec import MlpSpec, ModelSpec

WEIGHTS = llama_names()
_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama with those; a gate is one number for each head unless `gating` is per-element."""
    config = config.with_defaults(
        num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, hidden_act="silu", sliding_window=512,
        moe_intermediate_size=512, num_experts=256, num_experts_per_tok=8, rope_parameters=_ROPES,
    )  # fmt: skip
    if config.boolean("moe_apply_router_weight_on_input", False):
        raise ModelError(f"moe_apply_router_weight_on_input in {config.file} must be false")
    attn: dict[str, Any] = {
        "gated": True,
        "gate_by_head": config.get("gating", True) != "per-element",
        "gate_activation": "softplus",
    }
    if config.get("num_attention_heads_per_layer"):
        attn["num_heads"] = _heads(config)
    shared = MlpSpec(intermediate_size=config.size("shared_expert_intermediate_size", 512))
    moe = read_experts(
        config,
        score="sigmoid",
        has_correction=True,
        weight_scale=config.number("moe_routed_scaling_factor", 1.0),
        router_softcap=config.number("moe_router_logit_softcapping", 0.0),
        shared=shared,
    )
    return llama_like(
        config,
        layer_types=lambda config: config.texts("layer_types"),
        qk_norm="head",
        attn=attn,
        moe=moe,
        is_sparse=partial(sparse_after, default=1),
        **ATTN_FLAG,
    )


def _heads(config: HFConfig) -> ByLayer:
    heads, num_kv_heads = config.indices("num_attention_heads_per_layer"), config.size("num_key_value_heads")
    if len(heads) != config.num_layers() or any(not n or n % num_kv_heads for n in heads):
        raise ModelError(f"num_attention_heads_per_layer in {config.file} must list multiples of num_key_value_heads")
    return ByLayer(heads)
