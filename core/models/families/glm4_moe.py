"""GLM-4.5 and 4.6: partial rope, normalised heads in the large one, DeepSeek-V3's experts."""

from ..config import HFConfig
from ..llama_like import llama_like, replace_attention
from ..mixtures import read_deepseek_experts, replace_with_experts, sparse_after
from ..name_tables import CORRECTION, EXPERTS, SHARED_EXPERTS, llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names({**EXPERTS, **SHARED_EXPERTS}, tensors=CORRECTION)


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama; o_proj has no bias. The layer that predicts a second token is left out."""
    config = config.with_defaults(
        num_key_value_heads=8, max_position_embeddings=131072, hidden_act="silu", partial_rotary_factor=0.5,
        moe_intermediate_size=1408, num_experts_per_tok=8, n_shared_experts=1, n_routed_experts=128,
        num_nextn_predict_layers=1,
    )  # fmt: skip
    spec = llama_like(config, rms_norm_eps=1e-5)
    spec = replace_attention(
        spec,
        qk_norm=spec.norm if config.boolean("use_qk_norm", False) else None,
        qkv_bias=config.boolean("attention_bias", False),
    )
    return replace_with_experts(spec, read_deepseek_experts(config), sparse_after(config, "first_k_dense_replace", 1))
