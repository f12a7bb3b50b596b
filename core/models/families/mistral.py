"""Mistral 7B, Nemo, Small, Ministral 8B: Llama, of which some have a sliding window."""

from ..config import HFConfig
from ..llama_like import FULL, SLIDING, llama_like
from ..name_tables import LLAMA_NAMES
from ..spec import ModelSpec

WEIGHTS = LLAMA_NAMES


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama; all layers slide unless `sliding_window` is null. An absent key means 4096, as the class has it."""
    config = config.with_defaults(
        num_key_value_heads=8, max_position_embeddings=131072, hidden_act="silu", sliding_window=4096
    )
    kind = SLIDING if config.integer("sliding_window", null=0) else FULL
    return llama_like(config, layer_types=config.texts("layer_types") or [kind] * config.num_layers())
