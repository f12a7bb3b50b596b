"""OLMoE: experts, a norm over all heads of query and key, values that may be clipped."""

from ..config import HFConfig
from ..llama_like import llama_like, replace_attention
from ..mixtures import read_experts, replace_with_experts
from ..name_tables import EXPERTS, llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names(EXPERTS)


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama with experts of `intermediate_size`."""
    config = config.with_defaults(
        max_position_embeddings=4096, hidden_act="silu", num_experts=64, num_experts_per_tok=8
    )
    spec = llama_like(config, rms_norm_eps=1e-5)
    bias, clip_qkv = config.boolean("attention_bias", False), config.number("clip_qkv", 0.0, null=0.0)
    spec = replace_attention(
        spec, qk_norm=spec.norm, qk_norm_over="all", clip_qkv=clip_qkv, qkv_bias=bias, o_bias=bias
    )
    moe = read_experts(config, size="intermediate_size", renormalize=config.boolean("norm_topk_prob", False))
    return replace_with_experts(spec, moe)
