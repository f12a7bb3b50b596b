"""mT5 (Xue et al. 2020): T5 v1.1, whose output is never scaled."""

from ..config import HFConfig
from ..seq2seq import t5_like
from ..spec import ModelSpec
from .t5 import WEIGHTS

__all__ = ["WEIGHTS", "to_spec"]


def to_spec(config: HFConfig) -> ModelSpec:
    """As T5 v1.1, whatever the config says of its head."""
    return t5_like(config.with_defaults(feed_forward_proj="gated-gelu"), scales_output=False)
