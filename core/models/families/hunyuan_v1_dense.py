"""Hunyuan V1, dense: Llama whose query and key heads are normalised after rope."""

from ..config import HFConfig
from ..llama_like import llama_like, replace_attention
from ..name_tables import llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names({"attn.q_norm": "self_attn.query_layernorm", "attn.k_norm": "self_attn.key_layernorm"})


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama with norms on turned heads."""
    return hunyuan_like(config)


def hunyuan_like(config: HFConfig) -> ModelSpec:
    """What dense models and mixtures share. "dynamic" scaling with an `alpha` is a larger base of rope, no more."""
    config = config.with_defaults(max_position_embeddings=2048, hidden_act="silu")
    rope = config.rope_parameters()
    if rope.get("rope_type") == "dynamic" and rope.get("alpha"):
        head_dim = config.size("head_dim", config.size("hidden_size") // config.size("num_attention_heads"))
        theta = rope.number("rope_theta") * rope.number("alpha") ** (head_dim / (head_dim - 2))
        config = config.replace(rope_scaling=None, rope_parameters={"rope_type": "default", "rope_theta": theta})
    spec = llama_like(config, rms_norm_eps=1e-5)
    bias = config.boolean("attention_bias", False)
    return replace_attention(spec, qk_norm=spec.norm, norm_after_rope=True, qkv_bias=bias, o_bias=bias)
