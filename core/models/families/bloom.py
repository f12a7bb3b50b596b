"""BLOOM: ALiBi, normalised embeddings, fused qkv, biases everywhere."""

import dataclasses

from ...errors import ModelError
from ...weights.names import Stored
from ..config import HFConfig
from ..llama_like import layer_norm, llama_like, replace_attention, replace_mlp, turn_only, with_biases
from ..name_tables import IGNORE, name_table
from ..spec import ModelSpec

WEIGHTS = name_table(
    {
        "embed_tokens": "transformer.word_embeddings",
        "embed_norm": "transformer.word_embeddings_layernorm",
        "attn_norm": "input_layernorm",
        "attn.qkv_proj": Stored(name="self_attention.query_key_value", interleaved=True),
        "attn.o_proj": "self_attention.dense",
        "mlp_norm": "post_attention_layernorm",
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
    """Any length could be served; `seq_length` is what training saw."""
    if config.get("apply_residual_connection_post_layernorm"):
        raise ModelError(f"{config.file} takes residuals after the norms, which is not served")
    config = config.alias(
        hidden_size="n_embed", num_hidden_layers="n_layer", num_attention_heads="n_head",
        max_position_embeddings="seq_length",
    )  # fmt: skip
    config = config.with_defaults(max_position_embeddings=2048, tie_word_embeddings=True)
    config = config.replace(hidden_act="gelu_new", intermediate_size=4 * config.size("hidden_size"))
    spec = llama_like(config, norm=layer_norm(config, "layer_norm_epsilon"))
    spec = replace_mlp(with_biases(spec, attention=True, mlp=True), gated=False)
    spec = replace_attention(turn_only(spec, [False] * spec.num_layers), alibi_max_bias=8.0)
    return dataclasses.replace(spec, embed_norm=True)
