"""Granite 3 MoE: Granite with experts, stored as one tensor."""

from ...weights.names import Stored
from ..config import HFConfig
from ..dense_families import granite_like
from ..llama_like import with_biases
from ..mixtures import read_experts, replace_with_experts
from ..name_tables import llama_names
from ..spec import ModelSpec

EXPERTS: dict[str, str | Stored] = {
    "mlp.router": "block_sparse_moe.router.layer",
    "mlp.experts.gate_up_proj": Stored(name="block_sparse_moe.input_linear", stacked=True),
    "mlp.experts.down_proj": Stored(name="block_sparse_moe.output_linear", stacked=True),
}
WEIGHTS = llama_names(EXPERTS)


def to_spec(config: HFConfig) -> ModelSpec:
    """Granite; experts have `intermediate_size`."""
    config = config.with_defaults(num_local_experts=8, num_experts_per_tok=2)
    spec = with_biases(
        granite_like(config.with_defaults(max_position_embeddings=2048)),
        attention=config.boolean("attention_bias", False),
    )
    return replace_with_experts(spec, read_experts(config.with_defaults(hidden_act="silu"), size="intermediate_size"))
