"""Phi-3, Phi-3.5 and Phi-4 (mini): Llama with packed projections, LongRoPE and partial rotary embedding."""

import re

from ...weights.names import NameTable
from ..config import HFConfig
from ..llama_like import FULL, LLAMA_NAMES, SLIDING, llama_like
from ..spec import ModelSpec

_PACKED = {
    "layers.{i}.attn.qkv_proj.weight": "model.layers.{i}.self_attn.qkv_proj.weight",
    "layers.{i}.mlp.gate_up_proj.weight": "model.layers.{i}.mlp.gate_up_proj.weight",
}
_PARTS = re.compile(r"\.(q|k|v|gate|up)_proj\.")
WEIGHTS = NameTable(
    entries={**{ours: name for ours, name in LLAMA_NAMES.entries.items() if not _PARTS.search(ours)}, **_PACKED},
    ignore=LLAMA_NAMES.ignore,
)


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
