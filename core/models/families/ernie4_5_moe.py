"""ERNIE 4.5, mixtures: ERNIE with softmax experts chosen with a correction, in a range of layers."""

import dataclasses

from ...weights.names import Stored
from ..config import HFConfig
from ..llama_like import llama_like, turn_pairs, with_biases
from ..mixtures import read_experts, replace_with_experts
from ..name_tables import EXPERTS, SHARED_EXPERTS, llama_names
from ..spec import MlpSpec, ModelSpec

WEIGHTS = llama_names(
    {**EXPERTS, **SHARED_EXPERTS},
    tensors={"mlp.router.correction": Stored(name="mlp.moe_statics.e_score_correction_bias", stacked=True)},
    # Layers and heads that predict more tokens.
    ignore=(r"\.mtp_",),
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama with interleaved rope; sizes of experts are called moe_num_experts and moe_k."""
    config = config.alias(num_experts="moe_num_experts", num_experts_per_tok="moe_k").with_defaults(
        num_key_value_heads=4, max_position_embeddings=131072, hidden_act="silu", rope_theta=500000.0,
        tie_word_embeddings=True, moe_intermediate_size=1536, num_experts=64, num_experts_per_tok=6,
    )  # fmt: skip
    bias = config.boolean("use_bias", False)
    spec = turn_pairs(with_biases(llama_like(config, rms_norm_eps=1e-5), attention=bias, mlp=bias))
    size, num_shared = config.size("moe_intermediate_size"), config.integer("moe_num_shared_experts", 2, null=0)
    shared = MlpSpec(intermediate_size=size * num_shared, bias=bias) if num_shared else None
    moe = read_experts(config, has_correction=True, shared=shared)
    first, interval = config.integer("moe_layer_start_index", 1), config.size("moe_layer_interval", 1)
    stated = config.get("moe_layer_end_index", -1)
    last = spec.num_layers - 1 if stated in (-1, None) else config.integer("moe_layer_end_index")
    is_sparse = [first <= i <= last and (i + 1) % interval == 0 for i in range(spec.num_layers)]
    return dataclasses.replace(replace_with_experts(spec, moe, is_sparse), lm_head_bias=bias)
