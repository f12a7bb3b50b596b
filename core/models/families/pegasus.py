"""Pegasus (Zhang et al. 2019): BART with sinusoids, norms before its blocks and at the end, none of embeddings."""

from ..config import HFConfig
from ..seq2seq import bart_like, bart_names
from ..spec import ModelSpec

WEIGHTS = bart_names(final_norm=True)


def to_spec(config: HFConfig) -> ModelSpec:
    """As BART but for norms and positions."""
    return bart_like(config, pre_norm=True, final_norm=True, sinusoids="interleaved")
