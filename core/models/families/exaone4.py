"""EXAONE 4: norms after the blocks, normalised heads; with a window, only sliding layers have rope."""

from ..config import HFConfig
from ..llama_like import FULL, SLIDING, llama_like, replace_attention, replace_layers, turn_only
from ..name_tables import SANDWICH, llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names(SANDWICH)


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama; the pattern is a number, or one letter a layer: L slides, G sees all."""
    config = config.with_defaults(max_position_embeddings=2048, hidden_act="silu", sliding_window=4096)
    has_window, pattern = config.integer("sliding_window", null=0) > 0, config.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):
        period = len(pattern)
    else:
        period = config.integer("sliding_window_pattern", 4, null=0)
    layer_types = config.texts("layer_types") or [
        SLIDING if has_window and period and (i + 1) % period else FULL for i in range(config.num_layers())
    ]
    spec = llama_like(config, layer_types=layer_types, rms_norm_eps=1e-5)
    spec = replace_attention(spec, qk_norm=spec.norm)
    spec = replace_layers(spec, lambda layer: {"pre_norm": False, "post_norm": True})
    return turn_only(spec, [not has_window or layer.attn.window > 0 for layer in spec.layers])
