"""Phi-3, Phi-3.5 and Phi-4 (mini): Llama with packed projections, LongRoPE and partial rotary embedding."""

from ..config import HFConfig
from ..llama_like import FULL, SLIDING, llama_like
from ..name_tables import llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names({"attn.qkv_proj": "self_attn.qkv_proj", "mlp.gate_up_proj": "mlp.gate_up_proj"})


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama; all layers slide if `sliding_window` is set."""
    config = config.with_defaults(
        max_position_embeddings=4096, original_max_position_embeddings=4096, hidden_act="silu", sliding_window=None
    )
    kind = SLIDING if config.integer("sliding_window", null=0) else FULL
    scaling = config.mapping("rope_scaling")
    if scaling.get("rope_type", scaling.get("type")) in ("su", "yarn"):  # what early releases called LongRoPE
        config = config.replace(rope_scaling={**scaling, "rope_type": "longrope"})
    return llama_like(config, layer_types=[kind] * config.num_layers(), rms_norm_eps=1e-5)
