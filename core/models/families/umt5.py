"""UMT5 (Chung et al. 2023): T5 v1.1 with a bias by distance in each layer."""

from ..config import HFConfig
from ..seq2seq import t5_like, t5_names
from ..spec import ModelSpec

WEIGHTS = t5_names(bias_by_layer=True)


def to_spec(config: HFConfig) -> ModelSpec:
    """As T5 but for the biases."""
    return t5_like(config.with_defaults(feed_forward_proj="gated-gelu"), bias_by_layer=True)
