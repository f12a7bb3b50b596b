"""The language model of Aria: Llama with experts beside shared ones."""

from ...weights.names import Stored
from ..config import HFConfig
from ..llama_like import llama_like, with_biases
from ..mixtures import read_experts, replace_with_experts
from ..name_tables import SHARED_EXPERTS, llama_names
from ..spec import MlpSpec, ModelSpec

WEIGHTS = llama_names(
    {
        **SHARED_EXPERTS,
        "mlp.router": "mlp.router",
    },
    tensors={
        f"mlp.experts.{ours}.weight": Stored(
            name=f"mlp.experts.{theirs}.weight", also=(f"mlp.experts.{ours}",), transpose=True, stacked=True
        )
        for ours, theirs in (("gate_up_proj", "fc1"), ("down_proj", "fc2"))
    },
)


def to_spec(config: HFConfig) -> ModelSpec:
    """All experts have `intermediate_size`."""
    config = config.with_defaults(
        max_position_embeddings=2048, hidden_act="silu", intermediate_size=4096, moe_num_experts=8, moe_topk=2
    ).alias(num_experts="moe_num_experts", num_experts_per_tok="moe_topk")
    spec, size = llama_like(config), config.size("intermediate_size")
    spec = with_biases(spec, attention=config.boolean("attention_bias", False))
    shared = MlpSpec(intermediate_size=size * config.size("moe_num_shared_experts", 2))
    return replace_with_experts(spec, read_experts(config, size="intermediate_size", shared=shared))
