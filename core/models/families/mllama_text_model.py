"""Llama 3.2 Vision as it reads text: Llama, whose layers that attend to images alone do nothing."""

import dataclasses

from ...weights.names import Stored
from ..config import HFConfig
from ..llama_like import llama_like
from ..name_tables import llama_names
from ..spec import LayerSpec, ModelSpec

NUM_EXTRA_TOKENS = 8
WEIGHTS = llama_names({"embed_tokens": Stored(name="model.embed_tokens", extra_rows=NUM_EXTRA_TOKENS)})


def to_spec(config: HFConfig) -> ModelSpec:
    """Embeddings of the tokens that stand for images are left out."""
    config = config.with_defaults(
        num_key_value_heads=8, max_position_embeddings=131072, hidden_act="silu", rope_theta=500000.0,
        cross_attention_layers=[3, 8, 13, 18, 23, 28, 33, 38],
    )  # fmt: skip
    spec, crossed = llama_like(config, rms_norm_eps=1e-5), config["cross_attention_layers"]
    layers = (LayerSpec() if i in crossed else layer for i, layer in enumerate(spec.layers))
    return dataclasses.replace(spec, layers=tuple(layers))
