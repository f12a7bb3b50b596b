"""Blenderbot (Roller et al. 2020): BART with norms before its blocks and at the end, none of embeddings."""

from ..config import HFConfig
from ..seq2seq import bart_like, bart_names
from ..spec import ModelSpec

WEIGHTS = bart_names(final_norm=True)


def to_spec(config: HFConfig) -> ModelSpec:
    """The context is short: 128 tokens."""
    return bart_like(config.with_defaults(max_position_embeddings=128), pre_norm=True, final_norm=True)
