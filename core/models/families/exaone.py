"""EXAONE 3 and 3.5: Llama under GPT-2's names."""

from ..config import HFConfig
from ..llama_like import llama_like, with_biases
from ..name_tables import IGNORE, name_table
from ..spec import ModelSpec

WEIGHTS = name_table(
    {
        "embed_tokens": "transformer.wte",
        "attn_norm": "ln_1",
        "attn.q_proj": "attn.attention.q_proj",
        "attn.k_proj": "attn.attention.k_proj",
        "attn.v_proj": "attn.attention.v_proj",
        "attn.o_proj": "attn.attention.out_proj",
        "mlp_norm": "ln_2",
        "mlp.gate_proj": "mlp.c_fc_0",
        "mlp.up_proj": "mlp.c_fc_1",
        "mlp.down_proj": "mlp.c_proj",
        "final_norm": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    layer="transformer.h.{i}.",
    base_prefix="transformer.",
    ignore=(*IGNORE, r"rotary\.inv_freq$"),
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama; sizes are called num_layers, layer_norm_epsilon and activation_function here."""
    config = config.alias(
        num_hidden_layers="num_layers", rms_norm_eps="layer_norm_epsilon", hidden_act="activation_function"
    )
    config = config.with_defaults(
        num_key_value_heads=8, max_position_embeddings=4096, hidden_act="silu", rope_theta=500000.0
    )
    spec = llama_like(config, rms_norm_eps=1e-5)
    attention, mlp = config.boolean("attention_bias", False), config.boolean("mlp_bias", False)
    return with_biases(spec, attention=attention, mlp=mlp)
