"""Flint: Qwen3-MoE with sinks, sigmoid scores, a shared expert, and rope in sliding layers only."""

from ...weights.names import Stored
from ..config import HFConfig
from ..llama_like import FULL, SLIDING, llama_like, replace_attention, turn_only, with_biases
from ..mixtures import read_experts, replace_with_experts, sparse_steps
from ..name_tables import EXPERTS, llama_names
from ..spec import MlpSpec, ModelSpec

WEIGHTS = llama_names(
    {**EXPERTS, **{f"mlp.shared.{name}_proj": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}},
    tensors={"attn.sinks": Stored(name="self_attn.softmax_offset", also=("self_attn.sinks",))},
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama with all of that."""
    config = config.with_defaults(
        num_key_value_heads=4, head_dim=128, max_position_embeddings=262144, hidden_act="silu", sliding_window=513,
        moe_intermediate_size=512, num_experts=256, num_experts_per_tok=6, mlp_only_layers=[0, 1],
    )  # fmt: skip
    num_layers = config.num_layers()
    kinds = config.texts("layer_types") or [
        FULL if i < 2 or i % 4 == 1 or i == num_layers - 1 else SLIDING for i in range(num_layers)
    ]
    spec = llama_like(config, layer_types=kinds)
    spec = with_biases(spec, attention=config.boolean("attention_bias", False))
    spec = replace_attention(spec, qk_norm=spec.norm, sinks=True)
    spec = turn_only(spec, [layer.attn.window > 0 for layer in spec.layers])
    shared = MlpSpec(intermediate_size=config.size("shared_expert_intermediate_size", 1024))
    renormalize = config.boolean("norm_topk_prob", True)
    moe = read_experts(config, score="sigmoid", renormalize=renormalize, shared=shared)
    return replace_with_experts(spec, moe, sparse_steps(config))
