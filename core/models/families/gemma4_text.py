"""Gemma 4, text only: keys and values that layers share, inputs of each layer, experts beside the dense block."""

import dataclasses

from ...errors import ModelError
from ...weights.names import Stored
from ..config import HFConfig
from ..llama_like import FULL, SLIDING, llama_like, read_rope, share_keys
from ..mixtures import read_experts
from ..name_tables import LAYER_INPUTS, SANDWICH, llama_names
from ..spec import AttentionSpec, LayerSpec, ModelSpec, NormSpec

WEIGHTS = llama_names(
    {
        **SANDWICH, "mlp_out_norm": "post_feedforward_layernorm_1", "moe_norm": "pre_feedforward_layernorm_2",
        "moe_out_norm": "post_feedforward_layernorm_2", "moe.router": "router.proj",
        **LAYER_INPUTS,
    },
    tensors={
        "scalar": Stored(name="layer_scalar", is_scalar=True),
        "moe.router_norm.weight": "router.scale",
        "moe.experts.gate_up_proj.weight": Stored(name="experts.gate_up_proj", stacked=True),
        "moe.experts.down_proj.weight": Stored(
            name="experts.down_proj", stacked=True, scaled_by="router.per_expert_scale"
        ),
    },
)  # fmt: skip
_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}


def to_spec(config: HFConfig) -> ModelSpec:
    """Full layers have larger heads; the last layers read keys and values of the last layer before of their kind."""
    if config.get("use_bidirectional_attention") == "all":
        raise ModelError(f"{config.file} asks for bidirectional attention; only causal is served")
    config = config.with_defaults(
        num_key_value_heads=4, head_dim=256, max_position_embeddings=131072, sliding_window=512,
        hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True, rope_parameters=_ROPES,
        num_kv_shared_layers=0,
    )  # fmt: skip
    config = config.alias(hidden_act="hidden_activation", num_experts_per_tok="top_k_experts")
    num_layers = config.num_layers()
    kinds = list(config.texts("layer_types")) or [FULL if i % 6 == 5 else SLIDING for i in range(num_layers)]
    kinds[-1] = FULL
    spec = llama_like(config, layer_types=kinds)
    first_shared = num_layers - config.integer("num_kv_shared_layers")
    wide = 2 if config.boolean("use_double_wide_mlp", False) else 1
    has_experts = config.boolean("enable_moe_block", False)
    moe = read_experts(config, router_scale=spec.hidden_size**-0.5) if has_experts else None
    alone = LayerSpec(moe=moe, moe_beside=has_experts, post_norm=True, has_scalar=True)

    def finish(i: int, layer: LayerSpec) -> LayerSpec:
        attn, mlp = _attention(config, layer.attn, kinds[i], i), layer.mlp
        if i >= first_shared:
            mlp = dataclasses.replace(mlp, intermediate_size=mlp.intermediate_size * wide)
        return dataclasses.replace(alone, attn=attn, mlp=mlp)

    spec = dataclasses.replace(
        spec,
        layers=tuple(finish(i, layer) for i, layer in enumerate(spec.layers)),
        embed_scale=spec.hidden_size**0.5,
        layer_input_size=config.integer("hidden_size_per_layer_input", 256, null=0),
        logit_softcap=config.number("final_logit_softcapping", 0.0, null=0.0),
    )
    return share_keys(spec, kinds, config)


def _attention(config: HFConfig, attn: AttentionSpec, kind: str, layer_idx: int) -> AttentionSpec:
    norm, bias = NormSpec(eps=config.number("rms_norm_eps", 1e-6)), config.boolean("attention_bias", False)
    value_is_key = kind == FULL and config.boolean("attention_k_eq_v", False)
    by_layer = {int(key): value for key, value in config.mapping("per_layer_config").items()}
    own = HFConfig(by_layer.get(layer_idx, {}), file=config.file)
    if not by_layer and kind == FULL:
        kv_heads = config.get("num_global_key_value_heads") if value_is_key else None
        own = own.replace(head_dim=config.size("global_head_dim", 512), num_key_value_heads=kv_heads)
    head_dim, kv_heads = own.size("head_dim", attn.head_dim), own.size("num_key_value_heads", attn.num_kv_heads)
    return dataclasses.replace(
        attn, num_kv_heads=kv_heads, head_dim=head_dim, scale=1.0, rope=read_rope(config, head_dim, kind),
        qk_norm=norm, value_norm=dataclasses.replace(norm, weight=False), value_is_key=value_is_key, qkv_bias=bias,
        o_bias=bias,
    )  # fmt: skip
