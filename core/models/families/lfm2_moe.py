"""LFM2 with experts chosen by sigmoid."""

from ..config import HFConfig
from ..mixtures import read_experts, replace_with_experts, sparse_after
from ..name_tables import llama_names
from ..spec import ModelSpec
from .lfm2 import FF, NAMES, lfm2_like

_EXPERT = {"gate": "w1", "up": "w3", "down": "w2"}
WEIGHTS = llama_names(
    {
        **NAMES,
        "mlp.router": f"{FF}gate",
        **{f"mlp.experts.{{j}}.{ours}_proj": f"{FF}experts.{{j}}.{theirs}" for ours, theirs in _EXPERT.items()},
    },
    tensors={"mlp.router.correction": f"{FF}expert_bias"},
)


def to_spec(config: HFConfig) -> ModelSpec:
    """The first `num_dense_layers` are dense."""
    config = config.alias(tie_word_embeddings="tie_embedding").with_defaults(
        intermediate_size=7168, moe_intermediate_size=1792, num_experts=32, num_experts_per_tok=4
    )
    moe = read_experts(
        config.replace(hidden_act="silu"),
        score="sigmoid",
        renormalize=config.boolean("norm_topk_prob", True),
        weight_scale=config.number("routed_scaling_factor", 1.0),
        has_correction=config.boolean("use_expert_bias", True),
    )
    return replace_with_experts(lfm2_like(config), moe, sparse_after(config, "num_dense_layers", 2))
