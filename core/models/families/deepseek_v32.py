"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 with an index of the tokens that attention sees, `index_topk` at most."""

import dataclasses

from ..config import HFConfig
from ..latent import LATENT, latent_like
from ..mixtures import read_deepseek_experts, replace_with_experts, sparse_after
from ..name_tables import CORRECTION, EXPERTS, SHARED_EXPERTS, llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names(
    {**EXPERTS, **SHARED_EXPERTS, **LATENT}, tensors=CORRECTION, ignore=(r"\.self_attn\.indexer\.",)
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Up to `index_topk` tokens the index names them all, and it is not read: that is how far the context goes."""
    config = config.with_defaults(
        max_position_embeddings=163840, hidden_act="silu", moe_intermediate_size=2048, n_shared_experts=1,
        n_routed_experts=256, routed_scaling_factor=2.5, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64,
        v_head_dim=128, qk_nope_head_dim=128, n_group=8, topk_group=4, num_experts_per_tok=8,
        num_nextn_predict_layers=1,
    )  # fmt: skip
    spec = latent_like(config.replace(rope_interleave=True, layer_types=None))
    spec = replace_with_experts(spec, read_deepseek_experts(config), sparse_after(config, "first_k_dense_replace", 3))
    return dataclasses.replace(
        spec, max_position_embeddings=min(spec.max_position_embeddings, config.size("index_topk", 2048))
    )
