"""OLMo 3: OLMo 2 with three sliding layers to a full one, whose rope alone is stretched."""

from ..config import HFConfig
from ..llama_like import FULL, SLIDING, patterned_layer_types
from ..name_tables import SANDWICH, llama_names
from ..spec import ModelSpec
from .olmo2 import olmo2_like

WEIGHTS = llama_names(SANDWICH)


def to_spec(config: HFConfig) -> ModelSpec:
    """OLMo 2; `rope_scaling` holds for full layers."""
    config = config.with_defaults(sliding_window=4096)
    ropes = config.mapping("rope_parameters")
    theta = config.number("rope_theta", 500000.0)
    by_type = {kind: {"rope_theta": theta, **(ropes.get(kind) or {})} for kind in (FULL, SLIDING)}
    by_type[FULL].update(config.mapping("rope_scaling"))
    config = config.replace(rope_scaling=None, rope_parameters=by_type)
    return olmo2_like(config, patterned_layer_types(config, 4))
