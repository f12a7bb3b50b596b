"""MiMo-V2-Flash: experts by sigmoid, values smaller than keys, and sinks and more KV heads in sliding layers."""

from functools import partial

from ...errors import ModelError
from ..config import HFConfig, flag, number
from ..llama_like import FULL, SLIDING, ByLayer, llama_like
from ..mixtures import read_deepseek_experts, sparse_after
from ..name_tables import llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names(ignore=(r"^model\.mtp\.",))
_ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.334},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.334},
}


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama with all of that; o_proj never has a bias."""
    config = config.with_defaults(
        num_key_value_heads=4, head_dim=192, max_position_embeddings=131072, hidden_act="silu", sliding_window=129,
        moe_intermediate_size=2048, num_experts_per_tok=8, n_routed_experts=256, rope_parameters=_ROPES,
    ).replace(n_shared_experts=None)  # fmt: skip
    if config.get("sliding_window_size") is not None:
        config = config.replace(sliding_window=config.size("sliding_window_size") + 1)
    num_layers, scale = config.num_layers(), config.number("routed_scaling_factor", 1.0, null=1.0)
    kinds = config.texts("layer_types") or [SLIDING if i and (i + 1) % 6 else FULL for i in range(num_layers)]
    slides = [kind == SLIDING and config.integer("sliding_window") > 0 for kind in kinds]
    num_kv_heads = config.size("num_key_value_heads", config.size("num_attention_heads"))
    return llama_like(
        config,
        layer_types=kinds,
        rms_norm_eps=1e-5,
        qkv_bias=flag("attention_bias"),
        attn={
            "num_kv_heads": ByLayer(num_kv_heads * (2 if one else 1) for one in slides),
            "sinks": ByLayer(slides),
            "v_head_dim": _value_size,
            "out_scale": number("attention_value_scale", 0.707, null=1.0),
        },
        moe=read_deepseek_experts(config.replace(routed_scaling_factor=scale)),
        is_sparse=partial(sparse_after, default=1),
    )


def _value_size(config: HFConfig) -> int:
    head_dim, size = config.size("head_dim"), config.size("v_head_dim", 128)
    if size > head_dim:
        raise ModelError(
            f"v_head_dim ({size}) in {config.file} is more than head_dim ({head_dim}), which is not served"
        )
    return size if size < head_dim else 0
