"""ChatGLM 2 and 3, and GLM-4 9B as first published: GLM under Megatron's names."""

from ...errors import ModelError
from ..config import HFConfig, flag
from ..llama_like import llama_like
from ..name_tables import name_table
from ..spec import ModelSpec

WEIGHTS = name_table(
    {
        "embed_tokens": "transformer.embedding.word_embeddings", "lm_head": "transformer.output_layer",
        "final_norm": "transformer.encoder.final_layernorm", "attn_norm": "input_layernorm",
        "attn.qkv_proj": "self_attention.query_key_value", "attn.o_proj": "self_attention.dense",
        "mlp_norm": "post_attention_layernorm", "mlp.gate_up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
    layer="transformer.encoder.layers.{i}.",
    base_prefix="transformer.",
    ignore=(r"rotary_pos_emb\.inv_freq$",),
)  # fmt: skip


def to_spec(config: HFConfig) -> ModelSpec:
    """Half of each head is turned in pairs; `rope_ratio` multiplies the base of rope."""
    for key, value in (("rmsnorm", True), ("apply_residual_connection_post_layernorm", False)):
        if config.boolean(key, value) != value:
            raise ModelError(f"{key} in {config.file} must be {value}")
    groups = config.size("multi_query_group_num", 1) if config.boolean("multi_query_attention", False) else None
    config = config.alias(
        num_hidden_layers="num_layers", intermediate_size="ffn_hidden_size", head_dim="kv_channels",
        vocab_size="padded_vocab_size", max_position_embeddings="seq_length", rms_norm_eps="layernorm_epsilon",
    )  # fmt: skip
    config = config.replace(
        num_key_value_heads=groups or config.size("num_attention_heads"), hidden_act="silu",
        rope_theta=10000.0 * config.number("rope_ratio", 1.0), partial_rotary_factor=0.5,
    )  # fmt: skip
    bias = flag("add_bias_linear")
    return llama_like(
        config, rms_norm_eps=1e-5, in_pairs=True, attn_bias=bias, qkv_bias=flag("add_qkv_bias"), mlp_bias=bias,
        final_norm=flag("post_layer_norm", True),
    )  # fmt: skip
