"""Mellum 2: Qwen3-MoE with a window and a rope for each type of layer."""

from ..config import HFConfig
from ..llama_like import FULL, SLIDING, llama_like, replace_attention
from ..mixtures import read_experts, replace_with_experts, sparse_after
from ..name_tables import EXPERTS, llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names(EXPERTS, ignore=(r"^mtp\.",))
_ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 500000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}


def to_spec(config: HFConfig) -> ModelSpec:
    """Full layers and experts where the config lists no types."""
    config = config.with_defaults(
        num_key_value_heads=4, head_dim=128, max_position_embeddings=131072, hidden_act="silu", sliding_window=1024,
        moe_intermediate_size=896, num_experts=64, num_experts_per_tok=8, rope_parameters=_ROPES,
    )  # fmt: skip
    spec, bias = llama_like(config, layer_types=config.texts("layer_types")), config.boolean("attention_bias", False)
    spec = replace_attention(spec, qk_norm=spec.norm, qkv_bias=bias, o_bias=bias)
    moe = read_experts(config, renormalize=config.boolean("norm_topk_prob", True))
    return replace_with_experts(spec, moe, sparse_after(config, "first_k_dense_replace"))
