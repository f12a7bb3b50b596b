"""Trinity (AFMoE): gated attention, four norms a layer, rope in sliding layers only, experts by sigmoid."""

import dataclasses

from ..config import HFConfig
from ..llama_like import llama_like, patterned_layer_types, replace_attention, replace_layers, turn_only
from ..mixtures import read_deepseek_experts, replace_with_experts, sparse_after
from ..name_tables import EXPERTS, SHARED_EXPERTS, llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names(
    {
        **EXPERTS,
        **SHARED_EXPERTS,
        "mlp.router": "mlp.router.gate",
        "attn.gate_proj": "self_attn.gate_proj",
        "attn_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_mlp_layernorm",
        "mlp_post_norm": "post_mlp_layernorm",
    },
    tensors={"mlp.router.correction": "mlp.expert_bias"},
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama with all of that; weights of experts always sum to route_scale."""
    config = config.with_defaults(
        head_dim=128, max_position_embeddings=16384, hidden_act="silu", sliding_window=1024,
        moe_intermediate_size=1408, num_experts=64, num_experts_per_tok=6, num_shared_experts=2, route_scale=1.0,
    )  # fmt: skip
    config = config.alias(n_shared_experts="num_shared_experts", routed_scaling_factor="route_scale")
    config = config.replace(norm_topk_prob=True, n_group=None, topk_group=None)
    layer_types = patterned_layer_types(config, config.size("global_attn_every_n_layers", 4))
    spec = llama_like(config, layer_types=layer_types, rms_norm_eps=1e-5)
    bias = config.boolean("attention_bias", False)
    spec = replace_attention(spec, qk_norm=spec.norm, gated=True, qkv_bias=bias, o_bias=bias)
    spec = replace_layers(spec, lambda layer: {"post_norm": True})
    spec = turn_only(spec, [layer.attn.window > 0 for layer in spec.layers])
    if config.boolean("mup_enabled", False):
        spec = dataclasses.replace(spec, embed_scale=spec.hidden_size**0.5)
    return replace_with_experts(spec, read_deepseek_experts(config), sparse_after(config, "num_dense_layers", 1))
