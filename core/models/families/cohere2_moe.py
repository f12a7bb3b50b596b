"""Command A with experts: Command A whose first layers may be dense, and are turned though they see everything."""

import dataclasses

from ..config import HFConfig
from ..dense_families import cohere_like
from ..llama_like import FULL, SLIDING, replace_mlp, turn_only
from ..mixtures import read_experts, replace_with_experts, sparse_after
from ..name_tables import EXPERTS, SHARED_EXPERTS, llama_names
from ..spec import MlpSpec, ModelSpec, NormSpec

WEIGHTS = llama_names({**EXPERTS, **SHARED_EXPERTS})


def to_spec(config: HFConfig) -> ModelSpec:
    """Scores are softmax or sigmoid; routed and shared experts are added, or averaged."""
    config = config.with_defaults(
        head_dim=128, sliding_window=4096, num_experts=8, num_experts_per_tok=2, hidden_act="silu"
    )
    is_sparse, num_shared = sparse_after(config, "first_k_dense_replace"), config.integer("num_shared_experts", 0)
    first, period = config.size("prefix_dense_sliding_window_pattern", 1), config.size("sliding_window_pattern", 4)
    num_dense = config.integer("first_k_dense_replace", 0)
    periods = [first] * num_dense + [period] * (len(is_sparse) - num_dense)
    places = [*range(num_dense), *range(len(is_sparse) - num_dense)]
    kinds = config.texts("layer_types") or [
        SLIDING if (place + 1) % every else FULL for place, every in zip(places, periods, strict=True)
    ]
    spec = cohere_like(config, layer_types=kinds)
    eps, size = config.number("rms_norm_eps", 0.0, null=0.0), config.size("intermediate_size")
    spec = dataclasses.replace(spec, norm=NormSpec(eps=eps) if eps else spec.norm)
    turned = [
        layer.attn.window > 0 or (first == 1 and not s) for layer, s in zip(spec.layers, is_sparse, strict=True)
    ]
    spec = turn_only(replace_mlp(spec, intermediate_size=config.size("prefix_dense_intermediate_size", size)), turned)
    averages = num_shared and config.text("shared_expert_combination_strategy", "average") == "average"
    score, scale = config.text("expert_selection_fn", "softmax"), 0.5 if averages else 1.0
    moe = read_experts(
        config,
        size="intermediate_size",
        score="sigmoid" if score == "sigmoid" else "softmax",
        renormalize=score == "softmax" or config.boolean("norm_topk_prob", True),
        weight_scale=scale,
        shared=MlpSpec(intermediate_size=size * num_shared, out_scale=scale) if num_shared else None,
    )
    return replace_with_experts(spec, moe, is_sparse)
