"""Hunyuan 3: normalised heads, experts by sigmoid with a correction after the first dense layer."""

from ...weights.names import Stored
from ..config import HFConfig
from ..llama_like import llama_like, replace_attention, with_biases
from ..mixtures import read_deepseek_experts, replace_with_experts, sparse_after
from ..name_tables import EXPERTS, llama_names
from ..spec import ModelSpec

_SHARED = {
    f"mlp.shared.{name}_proj": Stored(name=f"mlp.shared_mlp.{name}_proj", also=(f"mlp.shared_experts.{name}_proj",))
    for name in ("gate", "up", "down")
}
WEIGHTS = llama_names(
    {**EXPERTS, **_SHARED, "mlp.router": Stored(name="mlp.router.gate", also=("mlp.gate",))},
    tensors={"mlp.router.correction": Stored(name="mlp.expert_bias", also=("mlp.e_score_correction_bias",))},
)


def to_spec(config: HFConfig) -> ModelSpec:
    """The layer that predicts a second token is left out."""
    config = config.with_defaults(
        num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, hidden_act="silu", rope_theta=11158840.0,
        moe_intermediate_size=1536, num_experts=192, num_experts_per_tok=8, num_shared_experts=1,
        router_scaling_factor=2.826,
        num_nextn_predict_layers=1,
    ).alias(n_shared_experts="num_shared_experts", routed_scaling_factor="router_scaling_factor")  # fmt: skip
    spec = with_biases(llama_like(config, rms_norm_eps=1e-5), attention=config.boolean("attention_bias", False))
    spec = replace_attention(spec, qk_norm=spec.norm)
    return replace_with_experts(spec, read_deepseek_experts(config), sparse_after(config, "first_k_dense_replace", 1))
