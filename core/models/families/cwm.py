"""Code World Model: Llama 3 whose layers slide, but for the first of every four."""

from ..config import HFConfig
from ..llama_like import FULL, llama_like, patterned_layer_types, replace_mlp
from ..name_tables import LLAMA_NAMES
from ..spec import ModelSpec

WEIGHTS = LLAMA_NAMES
_ROPE = {
    "rope_type": "llama3", "rope_theta": 1000000.0, "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama; without a window the layers that slide see everything."""
    config = config.with_defaults(
        num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, hidden_act="silu", sliding_window=8192,
        rope_parameters=_ROPE,
    )  # fmt: skip
    has_window = config.integer("sliding_window", null=0) > 0
    layer_types = patterned_layer_types(config, 4, full=0) if has_window else [FULL] * config.num_layers()
    spec = llama_like(config, layer_types=layer_types, rms_norm_eps=1e-5)
    return replace_mlp(spec, bias=config.boolean("mlp_bias", False))
