"""BioGPT: OPT's layers, scaled embeddings."""

import dataclasses

from ...weights.names import Stored
from ..config import HFConfig
from ..llama_like import llama_like, replace_mlp, turn_only, with_biases
from ..name_tables import BART_LAYER, IGNORE, name_table
from ..spec import ModelSpec, NormSpec

WEIGHTS = name_table(
    {
        **BART_LAYER,
        "embed_tokens": "biogpt.embed_tokens",
        "embed_positions": Stored(name="biogpt.embed_positions", skip_rows=2),
        "final_norm": "biogpt.layer_norm",
        "lm_head": "output_projection",
    },
    layer="biogpt.layers.{i}.",
    base_prefix="biogpt.",
    ignore=(*IGNORE, r"^output_projection\.weight$"),
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Norms have an epsilon of 1e-5 whatever the config says, as in transformers."""
    config = config.with_defaults(max_position_embeddings=1024, hidden_act="gelu", tie_word_embeddings=True)
    spec = llama_like(config, norm=NormSpec(kind="layer", eps=1e-5, bias=True))
    spec = replace_mlp(with_biases(spec, attention=True, mlp=True), gated=False)
    return dataclasses.replace(
        turn_only(spec, [False] * spec.num_layers),
        num_learned_positions=spec.max_position_embeddings,
        embed_scale=spec.hidden_size**0.5 if config.boolean("scale_embedding", True) else 1.0,
    )
