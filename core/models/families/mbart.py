"""mBART and mBART-50 (Liu et al. 2020): BART with norms before its blocks and at the end."""

from ..config import HFConfig
from ..seq2seq import bart_like, bart_names
from ..spec import ModelSpec

WEIGHTS = bart_names(embed_norm=True, final_norm=True, skip_positions=2)


def to_spec(config: HFConfig) -> ModelSpec:
    """As BART but for the norms."""
    return bart_like(config, pre_norm=True, embed_norm=True, final_norm=True)
