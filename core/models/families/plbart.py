"""PLBART (Ahmad et al. 2021): BART for programming languages, with scaled embeddings."""

from ..config import HFConfig
from ..seq2seq import bart_like
from ..spec import ModelSpec
from .bart import WEIGHTS

__all__ = ["WEIGHTS", "to_spec"]


def to_spec(config: HFConfig) -> ModelSpec:
    """Embeddings are scaled where the config does not say."""
    return bart_like(config.with_defaults(scale_embedding=True), embed_norm=True)
