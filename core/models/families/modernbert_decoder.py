"""ModernBERT's decoders (Ettin): its layers, causal, and its head before the embedding."""

import dataclasses

from ..config import HFConfig
from ..llama_like import read_activation
from ..name_tables import IGNORE, name_table
from ..spec import DenseSpec, ModelSpec
from . import modernbert

WEIGHTS = name_table(
    {
        **modernbert.MODULES,
        **{f"attn.{name}_proj": f"attn.{name}_proj" for name in "qkv"},
        "lm_head_dense": "lm_head.dense",
        "lm_head_dense_norm": "lm_head.norm",
        "lm_head": "decoder",
    },
    ignore=(*IGNORE, r"^decoder\.weight$"),
)


def to_spec(config: HFConfig) -> ModelSpec:
    """A window is `local_attention` / 2 tokens, the last one included."""
    config = config.with_defaults(local_attention=128)
    spec = dataclasses.replace(modernbert.to_spec(config.replace(architectures=None)), kind="decoder")
    layers = (
        dataclasses.replace(layer, attn=dataclasses.replace(layer.attn, window=max(layer.attn.window - 1, 0)))
        for layer in spec.layers
    )
    transform = DenseSpec(
        name="lm_head_dense",
        in_features=spec.hidden_size,
        out_features=spec.hidden_size,
        bias=config.boolean("classifier_bias", False),
        activation=read_activation(config.with_defaults(classifier_activation="gelu"), "classifier_activation"),
        norm=spec.norm,
    )
    return dataclasses.replace(
        spec,
        layers=tuple(layers),
        head_transform=transform,
        lm_head_bias=config.boolean("decoder_bias", True),
        tie_word_embeddings=config.boolean("tie_word_embeddings", True),
    )
