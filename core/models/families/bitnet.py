"""BitNet: Llama with squared ReLU and a norm before the last projection of each block."""

from ..config import HFConfig
from ..llama_like import llama_like, replace_attention, replace_mlp, with_biases
from ..name_tables import llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names({"attn.out_norm": "self_attn.attn_sub_norm", "mlp.inner_norm": "mlp.ffn_sub_norm"})


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama; weights of three values are stored as plain ones."""
    config = config.with_defaults(
        num_key_value_heads=5, max_position_embeddings=2048, hidden_act="relu2", rope_theta=500000.0
    )
    spec = with_biases(llama_like(config, rms_norm_eps=1e-5), attention=config.boolean("attention_bias", False))
    return replace_mlp(replace_attention(spec, out_norm=spec.norm), inner_norm=spec.norm)
