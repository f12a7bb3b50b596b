"""GPT-NeoX Japanese: GPT-NeoX with serial blocks and no bias but that of the last layer's attention."""

import dataclasses

from ..config import HFConfig
from ..llama_like import layer_norm, llama_like, replace_mlp
from ..spec import ModelSpec
from . import gpt_neox

WEIGHTS = gpt_neox.names("gpt_neox_japanese", {"attn.o_proj.bias": "attention.dense_bias"})


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama's walk with all of that."""
    config = config.alias(partial_rotary_factor="rotary_pct", rope_theta="rotary_emb_base").with_defaults(
        max_position_embeddings=2048, hidden_act="gelu", tie_word_embeddings=True,
        intermediate_size=config.size("hidden_size") * config.size("intermediate_multiple_size", 4),
    )  # fmt: skip
    spec = replace_mlp(llama_like(config, norm=layer_norm(config)), gated=False)
    *layers, last = spec.layers
    last = dataclasses.replace(last, attn=dataclasses.replace(last.attn, o_bias=True))
    return dataclasses.replace(spec, layers=(*layers, last))
