"""Sarvam 30B: GLM-4.5 with normalised heads that rope turns whole, and with names of its own."""

from ...weights.names import Stored
from ..config import HFConfig
from ..name_tables import EXPERTS, SHARED_EXPERTS, llama_names
from ..spec import ModelSpec
from . import glm4_moe

_AT = "attention."
WEIGHTS = llama_names(
    {
        **EXPERTS,
        **SHARED_EXPERTS,
        "embed_tokens": Stored(name="model.word_embeddings", also=("model.embed_tokens",)),
        "attn.qkv_proj": f"{_AT}query_key_value",
        "attn.o_proj": f"{_AT}dense",
        "attn.q_norm": f"{_AT}query_layernorm",
        "attn.k_norm": f"{_AT}key_layernorm",
    },
    tensors={"mlp.router.correction": "mlp.gate.expert_bias"},
)


def to_spec(config: HFConfig) -> ModelSpec:
    """GLM-4.5; published files call experts and biases otherwise."""
    config = config.alias(
        n_routed_experts="num_experts", n_shared_experts="num_shared_experts", attention_bias="use_qkv_bias"
    ).with_defaults(
        num_key_value_heads=4, head_dim=64, rms_norm_eps=1e-6, rope_theta=8000000.0, partial_rotary_factor=1.0,
        moe_intermediate_size=1024, num_experts_per_tok=6, routed_scaling_factor=2.5, use_qk_norm=True,
        num_nextn_predict_layers=0,
    )  # fmt: skip
    return glm4_moe.to_spec(config)
