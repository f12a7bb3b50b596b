"""FlexOlmo: OLMo 2 with experts."""

from ..config import HFConfig
from ..dense_families import olmo2_like
from ..mixtures import read_experts, replace_with_experts
from ..name_tables import EXPERTS, SANDWICH, llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names({**SANDWICH, **EXPERTS})


def to_spec(config: HFConfig) -> ModelSpec:
    """OLMo 2; experts have `intermediate_size`."""
    config = config.with_defaults(
        max_position_embeddings=4096, hidden_act="silu", rms_norm_eps=1e-6, rope_theta=500000.0, num_experts=7,
        num_experts_per_tok=5,
    )  # fmt: skip
    moe = read_experts(config, size="intermediate_size", renormalize=config.boolean("norm_topk_prob", False))
    return replace_with_experts(olmo2_like(config), moe)
