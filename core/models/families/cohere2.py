"""Command A and R7B: Command R with three sliding layers to a full one, which has no rope."""

from ..config import HFConfig
from ..llama_like import patterned_layer_types, turn_only
from ..name_tables import LLAMA_NAMES
from ..spec import ModelSpec
from .cohere import cohere_like

WEIGHTS = LLAMA_NAMES


def to_spec(config: HFConfig) -> ModelSpec:
    """Command R; layers without a window have no rope."""
    config = config.with_defaults(sliding_window=4096)
    spec = cohere_like(config, patterned_layer_types(config, config.size("sliding_window_pattern", 4)))
    return turn_only(spec, [layer.attn.window > 0 for layer in spec.layers])
