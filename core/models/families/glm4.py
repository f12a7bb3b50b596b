"""GLM-4-0414 (model_type glm4): GLM with norms after both blocks too."""

from ..config import HFConfig
from ..llama_like import replace_layers
from ..name_tables import llama_names
from ..spec import ModelSpec
from . import glm

WEIGHTS = llama_names(
    {
        "attn_post_norm": "post_self_attn_layernorm",
        "mlp_post_norm": "post_mlp_layernorm",
        "mlp.gate_up_proj": "mlp.gate_up_proj",
    }
)


def to_spec(config: HFConfig) -> ModelSpec:
    """GLM with four norms a layer."""
    return replace_layers(glm.to_spec(config), lambda layer: {"post_norm": True})
