"""Mixtral 8x7B and 8x22B: Mistral with experts."""

from ..config import HFConfig
from ..llama_like import FULL, SLIDING, llama_like
from ..mixtures import read_experts, replace_with_experts
from ..name_tables import BLOCK_SPARSE_EXPERTS, llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names(BLOCK_SPARSE_EXPERTS)


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama; all layers slide if `sliding_window` is set."""
    config = config.with_defaults(
        num_key_value_heads=8, max_position_embeddings=131072, hidden_act="silu", sliding_window=None,
        rope_theta=1000000.0, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    kind = SLIDING if config.integer("sliding_window", null=0) else FULL
    spec = llama_like(config, layer_types=[kind] * config.num_layers(), rms_norm_eps=1e-5)
    return replace_with_experts(spec, read_experts(config, size="intermediate_size"))
