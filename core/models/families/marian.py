"""Marian (Junczys-Dowmunt et al. 2018), Opus-MT's translators: BART with sinusoids and no norm of embeddings."""

import dataclasses

from ...errors import ModelError
from ..config import HFConfig
from ..seq2seq import bart_like, bart_names
from ..spec import ModelSpec

WEIGHTS = bart_names(encoder_changes={"embed_tokens": "model.encoder.embed_tokens"})


def to_spec(config: HFConfig) -> ModelSpec:
    """The halves may have embeddings, and vocabularies, of their own."""
    config = config.with_defaults(share_encoder_decoder_embeddings=True)
    spec = bart_like(config, sinusoids="interleaved")
    if config.boolean("share_encoder_decoder_embeddings"):
        if config.integer("decoder_vocab_size", spec.vocab_size, null=spec.vocab_size) != spec.vocab_size:
            raise ModelError(f"decoder_vocab_size in {config.file} is not vocab_size, but embeddings are shared")
        return spec
    assert spec.encoder is not None
    return dataclasses.replace(
        spec,
        vocab_size=config.integer("decoder_vocab_size", spec.vocab_size, null=spec.vocab_size),
        encoder=dataclasses.replace(spec.encoder, shares_embedding=False),
    )
