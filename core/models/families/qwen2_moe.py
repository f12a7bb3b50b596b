"""Qwen1.5-MoE and Qwen2-57B-A14B: Qwen2 with experts and a gated shared one."""

from ..config import HFConfig
from ..llama_like import llama_like, replace_attention, windowed_layer_types
from ..mixtures import read_experts, replace_with_experts, sparse_steps
from ..name_tables import EXPERTS, llama_names
from ..spec import MlpSpec, ModelSpec

WEIGHTS = llama_names(
    {
        **EXPERTS,
        **{f"mlp.shared.{name}_proj": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
        "mlp.shared_gate": "mlp.shared_expert_gate",
    }
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Qwen2; some layers may stay dense."""
    config = config.with_defaults(
        num_key_value_heads=16, max_position_embeddings=32768, hidden_act="silu", sliding_window=4096,
        max_window_layers=28, moe_intermediate_size=1408, shared_expert_intermediate_size=5632, num_experts=60,
        num_experts_per_tok=4,
    )  # fmt: skip
    spec = llama_like(config, layer_types=windowed_layer_types(config))
    spec = replace_attention(spec, qkv_bias=config.boolean("qkv_bias", True))
    shared = MlpSpec(
        intermediate_size=config.size("shared_expert_intermediate_size"), activation=spec.layers[0].mlp.activation
    )
    renormalize = config.boolean("norm_topk_prob", False)
    moe = read_experts(config, renormalize=renormalize, shared=shared, shared_gated=True)
    return replace_with_experts(spec, moe, sparse_steps(config))
