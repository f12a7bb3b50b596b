"""Hunyuan A13B: Hunyuan with experts and a shared one of the same size."""

from ...errors import ModelError
from ..config import HFConfig
from ..dense_families import hunyuan_like
from ..mixtures import read_experts, replace_with_experts
from ..name_tables import EXPERTS, llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names(
    {
        **EXPERTS,
        **{f"mlp.shared.{name}_proj": f"mlp.shared_mlp.{name}_proj" for name in ("gate", "up", "down")},
        "mlp.router": "mlp.gate.wg",
        "attn.q_norm": "self_attn.query_layernorm",
        "attn.k_norm": "self_attn.key_layernorm",
    }
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Hunyuan; `num_experts` and `moe_topk` may be lists with a number for each layer, all equal."""
    config = config.alias(num_experts_per_tok="moe_topk").with_defaults(num_experts=1, num_experts_per_tok=1)
    config = config.with_defaults(hidden_act="silu")
    for key in ("num_experts", "num_experts_per_tok"):
        values = config.get(key)
        if isinstance(values, list):
            if len(set(map(str, values))) != 1:
                raise ModelError(f"{key} in {config.file} differs from layer to layer, which is not served: {values}")
            config = config.replace(**{key: values[0]})
    spec = hunyuan_like(config)
    moe = read_experts(config, size="intermediate_size", shared=spec.layers[0].mlp)
    return replace_with_experts(spec, moe)
