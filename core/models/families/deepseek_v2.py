"""DeepSeek-V2, V2-Lite and Coder-V2: latent attention, softmax experts that may be chosen in groups."""

import dataclasses

from ...errors import ModelError
from ..config import HFConfig
from ..latent import LATENT, latent_like
from ..llama_like import replace_mlp
from ..mixtures import read_deepseek_experts, replace_with_experts, sparse_after
from ..name_tables import EXPERTS, SHARED_EXPERTS, llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names({**EXPERTS, **SHARED_EXPERTS, **LATENT})


def to_spec(config: HFConfig) -> ModelSpec:
    """Weights of experts are never divided by their sum, as in transformers."""
    config = config.with_defaults(
        max_position_embeddings=2048, hidden_act="silu", moe_intermediate_size=1407, n_shared_experts=2,
        n_routed_experts=64, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64, v_head_dim=128,
        qk_nope_head_dim=128,
    )  # fmt: skip
    method = config.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(f"topk_method in {config.file} must be greedy or group_limited_greedy, got {method!r}")
    if method == "greedy":
        config = config.replace(n_group=None, topk_group=None)
    moe = read_deepseek_experts(config, score="softmax", has_correction=False, renormalize=False, group_score="max")
    bias = config.boolean("mlp_bias", False)
    if moe.shared is not None:
        moe = dataclasses.replace(moe, shared=dataclasses.replace(moe.shared, bias=bias))
    spec = replace_mlp(latent_like(config), bias=bias)
    return replace_with_experts(spec, moe, sparse_after(config, "first_k_dense_replace"))
