"""DeepSeek-V3, R1, Kimi K2 (model_type deepseek_v3): latent attention, experts in groups with a correction."""

from ..config import HFConfig
from ..latent import LATENT, latent_like
from ..mixtures import read_deepseek_experts, replace_with_experts, sparse_after
from ..name_tables import CORRECTION, EXPERTS, SHARED_EXPERTS, llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names({**EXPERTS, **SHARED_EXPERTS, **LATENT}, tensors=CORRECTION)


def to_spec(config: HFConfig) -> ModelSpec:
    """The layer that predicts a second token is left out."""
    config = config.with_defaults(
        max_position_embeddings=4096, hidden_act="silu", moe_intermediate_size=2048, n_shared_experts=1,
        n_routed_experts=256, routed_scaling_factor=2.5, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64,
        v_head_dim=128, qk_nope_head_dim=128, n_group=8, topk_group=4, num_experts_per_tok=8,
        num_nextn_predict_layers=1,
    )  # fmt: skip
    moe = read_deepseek_experts(config)
    return replace_with_experts(latent_like(config), moe, sparse_after(config, "first_k_dense_replace", 3))
