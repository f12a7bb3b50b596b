"""MiniMax-M2: experts by sigmoid with a correction, a norm over all heads of query and key, partial rope."""

from ..config import HFConfig
from ..llama_like import llama_like, replace_attention
from ..mixtures import read_experts, replace_with_experts
from ..name_tables import BLOCK_SPARSE_EXPERTS, llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names(
    BLOCK_SPARSE_EXPERTS,
    tensors={"mlp.router.correction": "block_sparse_moe.e_score_correction_bias"},
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama; published files say `rotary_dim`."""
    config = config.alias(num_nextn_predict_layers="num_mtp_modules").with_defaults(
        num_key_value_heads=8, head_dim=128, max_position_embeddings=196608, hidden_act="silu", rope_theta=5000000.0,
        num_local_experts=256, num_experts_per_tok=8,
    )  # fmt: skip
    if config.get("rotary_dim"):
        # The quarter keeps int(head_dim * factor) at rotary_dim, whatever the division rounds to.
        factor = (config.size("rotary_dim") + 0.25) / config.size("head_dim")
        config = config.with_defaults(partial_rotary_factor=min(factor, 1.0))
    spec = llama_like(config)
    spec = replace_attention(spec, qk_norm=spec.norm, qk_norm_over="all")
    moe = read_experts(config, size="intermediate_size", score="sigmoid", has_correction=True)
    return replace_with_experts(spec, moe)
