"""SmolLM3: Llama, every fourth layer of which has no rope."""

from ..config import HFConfig
from ..llama_like import FULL, SLIDING, llama_like, turn_only, with_biases
from ..name_tables import LLAMA_NAMES
from ..spec import ModelSpec

WEIGHTS = LLAMA_NAMES


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama; `no_rope_layers` holds 1 for layers that do have rope, and only the others may slide."""
    config = config.with_defaults(
        num_key_value_heads=4, max_position_embeddings=32768, hidden_act="silu", rope_theta=2000000.0,
        tie_word_embeddings=True, sliding_window=None,
    )  # fmt: skip
    num_layers, interval = config.num_layers(), config.size("no_rope_layer_interval", 4)
    has_rope = config.flags("no_rope_layers") or [(i + 1) % interval != 0 for i in range(num_layers)]
    slides = config.boolean("use_sliding_window", False) and config.integer("sliding_window", null=0) > 0
    layer_types = config.texts("layer_types") or [SLIDING if slides and not turns else FULL for turns in has_rope]
    spec = turn_only(llama_like(config, layer_types=layer_types), has_rope)
    attention, mlp = config.boolean("attention_bias", False), config.boolean("mlp_bias", False)
    return with_biases(spec, attention=attention, mlp=mlp)
