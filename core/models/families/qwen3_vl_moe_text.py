"""The language model of Qwen3-VL with experts: Qwen3-MoE with experts stored in one tensor a layer."""

from ...weights.names import Stored
from ..config import HFConfig
from ..name_tables import llama_names
from ..spec import ModelSpec
from . import qwen3_moe

WEIGHTS = llama_names(
    {"mlp.router": "mlp.gate"},
    tensors={
        f"mlp.experts.{name}.weight": Stored(name=f"mlp.experts.{name}", transpose=True, stacked=True)
        for name in ("gate_up_proj", "down_proj")
    },
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Qwen3-MoE; weights of the chosen experts always sum to one."""
    config = config.with_defaults(
        num_key_value_heads=16, max_position_embeddings=128000, rope_theta=500000.0,
        moe_intermediate_size=1408, num_experts=60, num_experts_per_tok=4, tie_word_embeddings=True,
    )  # fmt: skip
    return qwen3_moe.to_spec(config.replace(norm_topk_prob=True, use_sliding_window=False))
