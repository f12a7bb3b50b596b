"""Ministral 8B: Llama whose layers slide, all of them or as listed."""

from ..config import HFConfig
from ..llama_like import FULL, SLIDING, llama_like
from ..name_tables import LLAMA_NAMES
from ..spec import ModelSpec

WEIGHTS = LLAMA_NAMES


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama; an absent `sliding_window` means 4096, null means none."""
    config = config.with_defaults(
        num_key_value_heads=8, max_position_embeddings=131072, hidden_act="silu", sliding_window=4096
    )
    kind = SLIDING if config.integer("sliding_window", null=0) else FULL
    return llama_like(config, layer_types=config.texts("layer_types") or [kind] * config.num_layers())
