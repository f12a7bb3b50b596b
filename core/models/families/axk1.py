"""A.X-K1: DeepSeek-V3 with a norm behind the experts; a checkpoint may lack the correction of their choice."""

from ...weights.names import Stored
from ..config import HFConfig
from ..latent import LATENT, latent_like
from ..mixtures import read_deepseek_experts, replace_with_experts, sparse_after
from ..name_tables import CORRECTION, EXPERTS, SHARED_EXPERTS, llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names(
    {
        **EXPERTS,
        **SHARED_EXPERTS,
        **LATENT,
        "mlp.out_norm": Stored(name="post_mlp_layernorm", also=("mlp.post_mlp_layernorm",)),
    },
    tensors=CORRECTION,
    ignore=(r"\.post_mlp_layernorm\.weight$",),  # of dense layers, which do not use it
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Layers that predict further tokens are left out."""
    config = config.with_defaults(
        max_position_embeddings=32768, hidden_act="silu", moe_intermediate_size=2048, n_shared_experts=1,
        n_routed_experts=192, routed_scaling_factor=2.5, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64,
        v_head_dim=128, qk_nope_head_dim=128, n_group=8, topk_group=4, num_experts_per_tok=8,
    )  # fmt: skip
    spec = latent_like(config)
    moe = read_deepseek_experts(config, out_norm=spec.norm, may_lack_correction=True)
    is_sparse = sparse_after(config, "first_k_dense_replace", 1)
    if not config.texts("mlp_layer_types"):
        every = config.size("moe_layer_freq", 1)
        is_sparse = [flag and i % every == 0 for i, flag in enumerate(is_sparse)]
    return replace_with_experts(spec, moe, is_sparse)
