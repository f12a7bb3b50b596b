"""Gemma 3, text only: Gemma 2 with normalised heads instead of soft caps, and a rope per layer type."""

from ..config import HFConfig
from ..dense_families import gemma_like
from ..llama_like import FULL, SLIDING
from ..name_tables import SANDWICH, llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names(SANDWICH)


def to_spec(config: HFConfig) -> ModelSpec:
    """Five sliding layers, then a full one whose rope has a larger base and may be stretched."""
    config = config.with_defaults(max_position_embeddings=131072, sliding_window=4096)
    num_layers, pattern = config.num_layers(), config.size("sliding_window_pattern", 6)
    layer_types = [SLIDING if (i + 1) % pattern else FULL for i in range(num_layers)]
    is_encoder = config.boolean("use_bidirectional_attention", False)
    if is_encoder:  # EmbeddingGemma; the window is then what a token sees on both sides together
        window = config.size("sliding_window") // 2 + 1
        config = config.replace(use_bidirectional_attention=False, sliding_window=window)
    kind = "encoder" if is_encoder else "decoder"
    config = config.replace(attn_logit_softcapping=None)  # transformers' class knows the key, and does not heed it
    return gemma_like(with_rope_per_layer_type(config), layer_types, qk_norm="head", kind=kind)


def with_rope_per_layer_type(config: HFConfig) -> HFConfig:
    """The config with rope parameters of both kinds of layers, however they are stated."""
    ropes = HFConfig(config.mapping("rope_parameters"), file=f"rope_parameters of {config.file}")
    full = {**ropes.mapping(FULL), **config.mapping("rope_scaling")}
    full.setdefault("rope_theta", config.number("rope_theta", 1_000_000.0))
    sliding = {**ropes.mapping(SLIDING)}
    sliding.setdefault("rope_theta", config.number("rope_local_base_freq", 10_000.0))
    return config.replace(rope_scaling=None, rope_parameters={FULL: full, SLIDING: sliding})
