"""Granite 3 MoE with a shared expert."""

import dataclasses

from ...weights.names import Stored
from ..config import HFConfig
from ..llama_like import replace_layers
from ..name_tables import llama_names
from ..spec import MlpSpec, ModelSpec
from . import granitemoe

NAMES: dict[str, str | Stored] = {
    **granitemoe.EXPERTS,
    "mlp.shared.gate_up_proj": "shared_mlp.input_linear",
    "mlp.shared.down_proj": "shared_mlp.output_linear",
}
WEIGHTS = llama_names(NAMES)


def to_spec(config: HFConfig) -> ModelSpec:
    """Granite MoE; a size of 0 shares nothing."""
    spec, size = granitemoe.to_spec(config), config.integer("shared_intermediate_size", 0)
    moe = spec.layers[0].moe
    if not size or moe is None:
        return spec
    moe = dataclasses.replace(moe, shared=MlpSpec(intermediate_size=size, activation=moe.activation))
    return replace_layers(spec, lambda layer: {"moe": moe})
