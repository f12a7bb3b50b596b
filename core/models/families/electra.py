"""ELECTRA (Clark et al. 2020): BERT whose embeddings may be smaller than the layers."""

import dataclasses

from ..bert_like import bert_like, bert_names, two_layer_head
from ..config import HFConfig
from ..spec import ModelSpec

WEIGHTS = bert_names(
    "electra.",
    {
        "embed_in": "electra.embeddings_project",
        "dense": "classifier.dense",
        "out_proj": "classifier.out_proj",
    },
)


def to_spec(config: HFConfig) -> ModelSpec:
    """A classifier's dense layer has the exact GELU."""
    config = config.with_defaults(
        vocab_size=30522, embedding_size=128, hidden_size=256, num_attention_heads=4, intermediate_size=1024
    )
    spec = bert_like(config, pooler=two_layer_head(config, ("dense", "out_proj"), "gelu"))
    size = config.size("embedding_size")
    return spec if size == spec.hidden_size else dataclasses.replace(spec, embed_size=size)
