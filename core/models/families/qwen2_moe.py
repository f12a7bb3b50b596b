"""Qwen1.5-MoE and Qwen2-57B-A14B: Qwen2 with experts and a gated shared one."""

from collections.abc import Mapping

from ...weights.names import Stored
from ..config import HFConfig
from ..llama_like import llama_like, read_activation, replace_attention, windowed_layer_types
from ..mixtures import read_experts, replace_with_experts, sparse_steps
from ..name_tables import EXPERTS, llama_names
from ..spec import MlpSpec, ModelSpec, MoeSpec

SHARED: Mapping[str, str | Stored] = {
    **EXPERTS,
    **{f"mlp.shared.{name}_proj": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
    "mlp.shared_gate": "mlp.shared_expert_gate",
}
"""Experts and the shared one."""
WEIGHTS = llama_names(SHARED)


def to_spec(config: HFConfig) -> ModelSpec:
    """Qwen2; some layers may stay dense."""
    config = config.with_defaults(
        num_key_value_heads=16, max_position_embeddings=32768, hidden_act="silu", sliding_window=4096,
        max_window_layers=28, moe_intermediate_size=1408, shared_expert_intermediate_size=5632, num_experts=60,
        num_experts_per_tok=4,
    )  # fmt: skip
    spec = llama_like(config, layer_types=windowed_layer_types(config))
    spec = replace_attention(spec, qkv_bias=config.boolean("qkv_bias", True))
    moe = read_shared(config, renormalize=config.boolean("norm_topk_prob", False))
    return replace_with_experts(spec, moe, sparse_steps(config))


def read_shared(config: HFConfig, *, renormalize: bool) -> MoeSpec:
    """Experts beside a gated shared one."""
    size, activation = config.size("shared_expert_intermediate_size"), read_activation(config, "hidden_act")
    shared = MlpSpec(intermediate_size=size, activation=activation)
    return read_experts(config, renormalize=renormalize, shared=shared, shared_gated=True)
