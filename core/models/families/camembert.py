"""CamemBERT (Martin et al. 2019): RoBERTa in French."""

from ..config import HFConfig
from ..spec import ModelSpec
from . import roberta

WEIGHTS = roberta.WEIGHTS


def to_spec(config: HFConfig) -> ModelSpec:
    """RoBERTa with another vocabulary."""
    return roberta.to_spec(config)
