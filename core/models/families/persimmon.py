"""Persimmon: layer norms, on heads too, fused qkv, half of each head turned, relu squared, biases everywhere."""

from ...weights.names import Stored
from ..config import HFConfig
from ..llama_like import layer_norm, llama_like, replace_attention, replace_mlp, with_biases
from ..name_tables import llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names(
    {
        "attn.qkv_proj": Stored(name="self_attn.query_key_value", interleaved=True),
        "attn.o_proj": "self_attn.dense",
        "attn.q_norm": "self_attn.q_layernorm",
        "attn.k_norm": "self_attn.k_layernorm",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
        "final_norm": "model.final_layernorm",
    }
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama's walk with all of that; as many KV heads as heads."""
    config = config.with_defaults(max_position_embeddings=16384, hidden_act="relu2", partial_rotary_factor=0.5)
    config = config.replace(num_key_value_heads=config.size("num_attention_heads"))
    spec = with_biases(llama_like(config, norm=layer_norm(config)), attention=True, mlp=True)
    if config.boolean("qk_layernorm", True):
        spec = replace_attention(spec, qk_norm=spec.norm)
    return replace_mlp(spec, gated=False)
