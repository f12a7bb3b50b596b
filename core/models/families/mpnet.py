"""MPNet (Song et al. 2020): RoBERTa's positions, no token types, and a bias of attention by distance."""

import dataclasses

from ...errors import ModelError
from ...weights.names import Stored
from ..bert_like import bert_like, encoder_names, two_layer_head
from ..config import HFConfig
from ..spec import ModelSpec
from .roberta import SKIPPED

WEIGHTS = encoder_names(
    {
        "embed_tokens": "mpnet.embeddings.word_embeddings",
        "embed_positions": Stored(name="mpnet.embeddings.position_embeddings", skip_rows=SKIPPED),
        "embed_norm": "mpnet.embeddings.LayerNorm",
        "attn.q_proj": "attention.attn.q",
        "attn.k_proj": "attention.attn.k",
        "attn.v_proj": "attention.attn.v",
        "attn.o_proj": "attention.attn.o",
        "attn_post_norm": "attention.LayerNorm",
        "mlp.up_proj": "intermediate.dense",
        "mlp.down_proj": "output.dense",
        "mlp_post_norm": "output.LayerNorm",
    },
    {
        "relative_bias": "mpnet.encoder.relative_attention_bias",
        "dense": "classifier.dense",
        "out_proj": "classifier.out_proj",
    },
    layer="mpnet.encoder.layer.{i}.",
    prefix="mpnet.",
    ignore=(r"position_ids$", r"^(mpnet\.)?pooler\.", r"^lm_head\."),
)


def to_spec(config: HFConfig) -> ModelSpec:
    """transformers' own code knows 32 buckets, whatever the config says, and begins positions behind 1."""
    config = config.with_defaults(vocab_size=30527, hidden_size=768, relative_attention_num_buckets=32)
    if config.size("relative_attention_num_buckets") != 32:
        raise ModelError(f"relative_attention_num_buckets in {config.file} must be 32")
    head = two_layer_head(config, ("dense", "out_proj"), "tanh")
    spec = bert_like(config.replace(type_vocab_size=0), skip_positions=SKIPPED, pooler=head)
    return dataclasses.replace(spec, num_relative_buckets=32)
