"""T5, T5 v1.1, Flan-T5, ByT5, UL2 (Raffel et al. 2019): one bias by distance for all layers of each half."""

from ..config import HFConfig
from ..seq2seq import t5_like, t5_names
from ..spec import ModelSpec

WEIGHTS = t5_names()


def to_spec(config: HFConfig) -> ModelSpec:
    """The feed-forward block is gated where the config says so."""
    return t5_like(config)
