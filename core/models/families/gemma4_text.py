"""Gemma 4, text only: keys and values that layers share, inputs of each layer, experts beside the dense block."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ModelError
from ...weights.names import Stored
from ..config import HFConfig
from ..dense_families import ATTN_FLAG, root_of_size
from ..llama_like import FULL, SLIDING, ByLayer, llama_like, read_rope, rms_norm, shared_keys
from ..mixtures import read_experts
from ..name_tables import SANDWICH, llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names(
    {
        **SANDWICH, "mlp_out_norm": "post_feedforward_layernorm_1", "moe_norm": "pre_feedforward_layernorm_2",
        "moe_out_norm": "post_feedforward_layernorm_2", "moe.router": "router.proj",
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
    first_shared = num_layers - config.integer("num_kv_shared_layers")
    size, wide = config.size("intermediate_size"), 2 if config.boolean("use_double_wide_mlp", False) else 1
    has_experts, hidden_size = config.boolean("enable_moe_block", False), config.size("hidden_size")
    return llama_like(
        config,
        layer_types=kinds,
        qk_norm="head",
        attn=_attention(config, kinds),
        mlp={"intermediate_size": ByLayer(size * wide if i >= first_shared else size for i in range(num_layers))},
        moe=read_experts(config, router_scale=hidden_size**-0.5) if has_experts else None,
        layer={"moe_beside": has_experts, "post_norm": True, "has_scalar": True},
        embed_scale=root_of_size,
        layer_input_size=config.integer("hidden_size_per_layer_input", 256, null=0),
        logit_softcap=config.number("final_logit_softcapping", 0.0, null=0.0),
        **ATTN_FLAG,
    )


def _attention(config: HFConfig, kinds: Sequence[str]) -> Mapping[str, Any]:
    """Fields of each layer's attention."""
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    by_layer = {int(key): value for key, value in config.mapping("per_layer_config").items()}
    head_dims, kv_heads, is_key = list[int](), list[int](), list[bool]()
    for i, kind in enumerate(kinds):
        value_is_key = kind == FULL and config.boolean("attention_k_eq_v", False)
        own = HFConfig(by_layer.get(i, {}), file=config.file)
        if not by_layer and kind == FULL:
            num = config.get("num_global_key_value_heads") if value_is_key else None
            own = own.replace(head_dim=config.size("global_head_dim", 512), num_key_value_heads=num)
        head_dims.append(own.size("head_dim", config.size("head_dim", hidden_size // num_heads or None)))
        kv_heads.append(own.size("num_key_value_heads", config.size("num_key_value_heads", num_heads)))
        is_key.append(value_is_key)
    return {
        "num_kv_heads": ByLayer(kv_heads),
        "head_dim": ByLayer(head_dims),
        "scale": 1.0,
        "rope": ByLayer(read_rope(config, dim, kind) for dim, kind in zip(head_dims, kinds, strict=True)),
        "value_norm": rms_norm(config, weight=False),
        "value_is_key": ByLayer(is_key),
        "kv_layer": shared_keys(config, kinds),
    }
