"""CTRL (Keskar et al. 2019): GPT-2's layers with sines for positions, scaled embeddings and a bias on the head."""

import dataclasses

from ..config import HFConfig
from ..llama_like import llama_like, replace_mlp, turn_only, with_biases
from ..name_tables import IGNORE, name_table
from ..spec import ModelSpec, NormSpec

WEIGHTS = name_table(
    {
        "embed_tokens": "transformer.w",
        "attn_norm": "layernorm1",
        **{f"attn.{name}_proj": f"multi_head_attention.W{name}" for name in "qkv"},
        "attn.o_proj": "multi_head_attention.dense",
        "mlp_norm": "layernorm2",
        "mlp.up_proj": "ffn.0",
        "mlp.down_proj": "ffn.2",
        "final_norm": "transformer.layernorm",
        "lm_head": "lm_head",
    },
    layer="transformer.h.{i}.",
    base_prefix="transformer.",
    ignore=IGNORE,
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Norms of layers have an epsilon of 1e-6, whatever the config says; so has the last one in each file."""
    config = config.alias(
        hidden_size="n_embd", num_hidden_layers="n_layer", num_attention_heads="n_head",
        max_position_embeddings="n_positions",
    ).with_defaults(max_position_embeddings=256, tie_word_embeddings=True).replace(
        intermediate_size=config.size("dff", 8192), hidden_act="relu"
    )  # fmt: skip
    spec = llama_like(config, norm=NormSpec(kind="layer", eps=1e-6, bias=True))
    spec = replace_mlp(with_biases(spec, attention=True, mlp=True), gated=False)
    return dataclasses.replace(
        turn_only(spec, [False] * spec.num_layers),
        num_learned_positions=spec.max_position_embeddings,
        sinusoids="interleaved",
        embed_scale=spec.hidden_size**0.5,
        lm_head_bias=True,
    )
