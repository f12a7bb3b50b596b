"""Granite SWA with experts."""

from ...weights.names import Stored
from ..config import HFConfig
from ..name_tables import llama_names
from ..spec import ModelSpec
from . import granitemoeshared
from .granite_swa import with_windows

_AT = "block_sparse_moe."
WEIGHTS = llama_names(
    {
        **granitemoeshared.NAMES,
        "mlp.router": f"{_AT}router",
    },
    tensors={
        "attn.sinks": "self_attn.sinks",
        "mlp.experts.gate_up_proj.weight": Stored(name=f"{_AT}experts.gate_up_proj", stacked=True),
        "mlp.experts.down_proj.weight": Stored(name=f"{_AT}experts.down_proj", stacked=True),
    },
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Granite MoE with what Granite SWA adds."""
    return with_windows(granitemoeshared.to_spec(config), config)
