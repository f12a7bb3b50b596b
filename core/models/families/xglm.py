"""XGLM: a decoder of BART's kind with norms before its blocks and sines for positions."""

import dataclasses

from ...weights.names import Stored
from ..config import HFConfig
from ..llama_like import llama_like, replace_mlp, turn_only, with_biases
from ..name_tables import BART_LAYER, IGNORE, name_table
from ..spec import ModelSpec, NormSpec

WEIGHTS = name_table(
    {
        **BART_LAYER,
        "embed_tokens": Stored(name="model.embed_tokens", copies=("lm_head",)),
        "final_norm": "model.layer_norm",
        "lm_head": "lm_head",
    },
    ignore=(*IGNORE, r"embed_positions\.weights?$"),
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Positions begin in row 2, and all norms have an epsilon of 1e-5, as in transformers."""
    config = config.alias(
        hidden_size="d_model", num_hidden_layers="num_layers",
        num_attention_heads="attention_heads", hidden_act="activation_function",
    )  # fmt: skip
    config = config.with_defaults(max_position_embeddings=2048, hidden_act="gelu", tie_word_embeddings=True)
    config = config.replace(intermediate_size=config.size("ffn_dim", 4096))
    spec = llama_like(config, norm=NormSpec(kind="layer", eps=1e-5, bias=True))
    spec = replace_mlp(with_biases(spec, attention=True, mlp=True), gated=False)
    return dataclasses.replace(
        turn_only(spec, [False] * spec.num_layers),
        num_learned_positions=spec.max_position_embeddings,
        sinusoids="halves",
        first_position=2,
        embed_scale=spec.hidden_size**0.5 if config.boolean("scale_embedding", True) else 1.0,
    )
