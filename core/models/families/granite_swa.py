"""Granite SWA: Granite with sinks, three sliding layers to a full one, and a base of rope for each layer."""

import dataclasses

from ...errors import ModelError
from ..config import HFConfig
from ..dense_families import FLAGS, granite_like
from ..llama_like import SLIDING, patterned_layer_types
from ..name_tables import llama_names
from ..spec import AttentionSpec, ModelSpec

WEIGHTS = llama_names(tensors={"attn.sinks": "self_attn.sinks"})


def to_spec(config: HFConfig) -> ModelSpec:
    """Granite with all of that; a base of 0 is no rope."""
    config = config.with_defaults(
        num_key_value_heads=4, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True
    )
    return with_windows(granite_like(config, **FLAGS), config)


def with_windows(spec: ModelSpec, config: HFConfig) -> ModelSpec:
    """The spec with sinks, and with windows and bases as the config lists them for layers."""
    kinds, window = patterned_layer_types(config, 4, full=0), config.size("sliding_window", 128)
    thetas = config.get("layer_rope_theta") or [None] * spec.num_layers
    if len(kinds) != spec.num_layers or len(thetas) != spec.num_layers:
        raise ModelError(f"{config.file} must list as many layer_types and layer_rope_theta as layers")

    def finish(attn: AttentionSpec, kind: str, theta: float | None) -> AttentionSpec:
        rope = attn.rope
        if rope is not None and theta is not None:
            rope = dataclasses.replace(rope, theta=float(theta)) if theta else None
        return dataclasses.replace(attn, sinks=True, rope=rope, window=window if kind == SLIDING else 0)

    layers = (
        dataclasses.replace(layer, attn=finish(layer.attn, kind, theta))
        for layer, kind, theta in zip(spec.layers, kinds, thetas, strict=True)
    )
    return dataclasses.replace(spec, layers=tuple(layers))
