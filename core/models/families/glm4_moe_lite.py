"""GLM-4.7-Flash: latent attention and DeepSeek-V3's experts."""

from ..config import HFConfig
from ..latent import LATENT, latent_like
from ..mixtures import read_deepseek_experts, replace_with_experts, sparse_after
from ..name_tables import CORRECTION, EXPERTS, SHARED_EXPERTS, llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names({**EXPERTS, **SHARED_EXPERTS, **LATENT}, tensors=CORRECTION)


def to_spec(config: HFConfig) -> ModelSpec:
    """The first layer is dense unless listed otherwise."""
    config = config.with_defaults(
        max_position_embeddings=202752, hidden_act="silu", moe_intermediate_size=1536, n_shared_experts=1,
        n_routed_experts=64, routed_scaling_factor=1.8, kv_lora_rank=512, q_lora_rank=768, qk_rope_head_dim=64,
        v_head_dim=256, qk_nope_head_dim=192, num_experts_per_tok=4,
        num_nextn_predict_layers=1,
    )  # fmt: skip
    spec = latent_like(config, rms_norm_eps=1e-5)
    return replace_with_experts(spec, read_deepseek_experts(config), sparse_after(config, "first_k_dense_replace", 1))
