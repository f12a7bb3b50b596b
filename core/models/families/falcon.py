"""Falcon 7B, 40B, 180B and RW: fused qkv of one or a few KV heads, parallel blocks; RW has ALiBi and is serial."""

from ...weights.names import Stored
from ..config import HFConfig
from ..llama_like import (
    layer_norm,
    llama_like,
    replace_attention,
    replace_layers,
    replace_mlp,
    turn_only,
    with_biases,
)
from ..name_tables import IGNORE, name_table
from ..spec import ModelSpec

WEIGHTS = name_table(
    {
        "embed_tokens": "transformer.word_embeddings",
        "attn_norm": Stored(name="input_layernorm", also=("ln_attn",)),
        "attn.qkv_proj": Stored(name="self_attention.query_key_value", interleaved=True),
        "attn.o_proj": "self_attention.dense",
        "mlp_norm": Stored(name="post_attention_layernorm", also=("ln_mlp",)),
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
        "final_norm": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    layer="transformer.h.{i}.",
    base_prefix="transformer.",
    ignore=IGNORE,
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Biases of ALiBi are scaled with the scores, as Falcon-RW was trained."""
    config = config.alias(
        hidden_act="activation", num_hidden_layers="n_layer",
        num_attention_heads="n_head",
    )  # fmt: skip
    config = config.with_defaults(max_position_embeddings=2048, hidden_act="gelu", tie_word_embeddings=True)
    config = config.replace(intermediate_size=config.size("ffn_hidden_size", 4 * config.size("hidden_size")))
    is_new, num_heads = config.boolean("new_decoder_architecture", False), config.size("num_attention_heads")
    num_kv_heads = 1 if config.boolean("multi_query", True) else num_heads
    if is_new:
        num_kv_heads = config.size("num_kv_heads", num_heads)
    config = config.replace(num_key_value_heads=num_kv_heads)
    bias = config.boolean("bias", False)
    spec = llama_like(config, norm=layer_norm(config, "layer_norm_epsilon"))
    spec = replace_mlp(with_biases(spec, attention=bias, mlp=bias), gated=False)
    if config.boolean("alibi", False):
        spec = turn_only(spec, [False] * spec.num_layers)
        spec = replace_attention(spec, alibi_max_bias=8.0, alibi_scale=spec.layers[0].attn.scale)
    is_parallel = is_new or config.boolean("parallel_attn", True)
    has_two = is_new and config.integer("num_ln_in_parallel_attn", 2) == 2
    return replace_layers(spec, lambda _: {"parallel": is_parallel, "shared_norm": is_parallel and not has_two})
