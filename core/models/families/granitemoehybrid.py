"""Granite 4: Mamba-2 and attention, with experts beside a shared block, or the shared block alone."""

import dataclasses

from ..config import HFConfig
from ..dense_families import granite_like
from ..hybrids import mixer_modules, mixer_tensors, read_mamba2, recurrent_layers, replace_with_mixers
from ..llama_like import replace_mlp, turn_only, with_biases
from ..mixture_families import GRANITE_EXPERTS
from ..mixtures import read_experts, replace_with_experts
from ..name_tables import llama_names
from ..spec import MlpSpec, ModelSpec

WEIGHTS = llama_names(
    {
        **GRANITE_EXPERTS,
        **mixer_modules("mamba."),
        **{f"{block}.gate_up_proj": "shared_mlp.input_linear" for block in ("mlp", "mlp.shared")},
        **{f"{block}.down_proj": "shared_mlp.output_linear" for block in ("mlp", "mlp.shared")},
    },
    tensors=mixer_tensors("mamba."),
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Granite's multipliers; rope only if position_embedding_type asks for it."""
    size = config.size("shared_intermediate_size", 1024)
    spec = replace_mlp(granite_like(config.with_defaults(max_position_embeddings=2048)), intermediate_size=size)
    spec = with_biases(spec, attention=config.boolean("attention_bias", False))
    if config.get("position_embedding_type") != "rope":
        spec = turn_only(spec, [False] * spec.num_layers)
    is_recurrent = recurrent_layers(config, "layer_types", "layers_block_type") or [True] * spec.num_layers
    spec = replace_with_mixers(spec, read_mamba2(config, spec.norm), is_recurrent)
    if not config.integer("num_local_experts", 8):
        return spec
    config = config.with_defaults(num_local_experts=8, num_experts_per_tok=2, hidden_act="silu")
    moe = read_experts(config, size="intermediate_size")
    shared = MlpSpec(intermediate_size=size, activation=moe.activation)
    return replace_with_experts(spec, dataclasses.replace(moe, shared=shared))
