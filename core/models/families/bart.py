"""BART (Lewis et al. 2019): norms after each residual add, learned positions that begin in row 2."""

from ..config import HFConfig
from ..seq2seq import bart_like, bart_names
from ..spec import ModelSpec

WEIGHTS = bart_names(embed_norm=True, skip_positions=2)


def to_spec(config: HFConfig) -> ModelSpec:
    """transformers no longer reads the flags that once told BART's relatives apart."""
    return bart_like(config, embed_norm=True)
