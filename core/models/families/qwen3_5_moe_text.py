"""Qwen3.5 with experts, text only."""

from ..config import HFConfig
from ..mixtures import read_shared, replace_with_experts
from ..spec import ModelSpec
from . import qwen3_5_text
from .qwen3_next import qwen3_next_like

WEIGHTS = qwen3_5_text.WEIGHTS


def to_spec(config: HFConfig) -> ModelSpec:
    """Every layer has experts, whose weights sum to one."""
    config = config.with_defaults(
        moe_intermediate_size=512, shared_expert_intermediate_size=512, num_experts=256, num_experts_per_tok=8,
        hidden_act="silu",
    )  # fmt: skip
    config = config.with_defaults(intermediate_size=config.size("moe_intermediate_size"))
    return replace_with_experts(qwen3_next_like(config), read_shared(config, renormalize=True))
