"""Qwen3-30B-A3B and 235B-A22B: Qwen3 with experts."""

from ..config import HFConfig
from ..llama_like import FULL, SLIDING, llama_like, replace_attention
from ..mixtures import read_experts, replace_with_experts, sparse_steps
from ..name_tables import EXPERTS, llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names(EXPERTS)


def to_spec(config: HFConfig) -> ModelSpec:
    """Qwen3; some layers may stay dense. head_dim is hidden_size / num_heads unless stated."""
    config = config.with_defaults(
        num_key_value_heads=4, max_position_embeddings=32768, hidden_act="silu", sliding_window=4096,
        moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
    )  # fmt: skip
    slides = config.boolean("use_sliding_window", False) and config.integer("sliding_window", null=0) > 0
    spec = llama_like(config, layer_types=[SLIDING if slides else FULL] * config.num_layers())
    bias = config.boolean("attention_bias", False)
    spec = replace_attention(spec, qk_norm=spec.norm, qkv_bias=bias, o_bias=bias)
    moe = read_experts(config, renormalize=config.boolean("norm_topk_prob", False))
    return replace_with_experts(spec, moe, sparse_steps(config))
