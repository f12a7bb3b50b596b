"""Llama 3.2 Vision as it reads text: Llama, whose layers that attend to a picture alone do nothing."""

import dataclasses

from ...errors import ModelError
from ...weights.names import Stored
from ..config import HFConfig
from ..llama_like import llama_like
from ..name_tables import llama_names
from ..spec import LayerSpec, ModelSpec

NUM_EXTRA_TOKENS = 8
WEIGHTS = llama_names(
    {"embed_tokens": Stored(name="model.embed_tokens", extra_rows=NUM_EXTRA_TOKENS)},
    ignore=(r"^model\.layers\.\d*[38]\.",),
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Every fifth layer is such a one in each published size; embeddings of picture tokens are left out."""
    config = config.with_defaults(
        num_key_value_heads=8, max_position_embeddings=131072, hidden_act="silu", rope_theta=500000.0
    )
    spec = llama_like(config, rms_norm_eps=1e-5)
    num_layers = spec.num_layers
    crossed, known = config.get("cross_attention_layers"), [i for i in range(num_layers) if i % 5 == 3]
    if crossed is not None and [i for i in crossed if i < num_layers] != known:
        raise ModelError(f"cross_attention_layers in {config.file} are {crossed}; known is every fifth from 3 on")
    layers = (LayerSpec() if i in known else layer for i, layer in enumerate(spec.layers))
    return dataclasses.replace(spec, layers=tuple(layers))
