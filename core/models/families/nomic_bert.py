"""Nomic BERT (Nussbaum et al. 2024): BERT with rope and a gated feed-forward block, without biases there."""

import dataclasses

from ..bert_like import bert_like, encoder_names, two_layer_head
from ..config import HFConfig
from ..llama_like import read_rope, replace_layers
from ..spec import ModelSpec

WEIGHTS = encoder_names(
    {
        "embed_tokens": "nomic_bert.embeddings.word_embeddings",
        "embed_token_types": "nomic_bert.embeddings.token_type_embeddings",
        "embed_norm": "nomic_bert.embeddings.LayerNorm",
        "attn.qkv_proj": "attn.Wqkv",
        "attn.q_proj": "self_attn.q_proj",
        "attn.k_proj": "self_attn.k_proj",
        "attn.v_proj": "self_attn.v_proj",
        "attn.o_proj": "self_attn.o_proj",
        "attn_post_norm": "post_attention_layernorm",
        "mlp.gate_proj": "mlp.gate_proj",
        "mlp.up_proj": "mlp.up_proj",
        "mlp.down_proj": "mlp.down_proj",
        "mlp_post_norm": "post_mlp_layernorm",
    },
    {"pooler": "nomic_bert.pooler.dense", "classifier": "classifier"},
    layer="nomic_bert.layers.{i}.",
    prefix="nomic_bert.",
    ignore=(r"inv_freq$", r"^(nomic_bert\.)?pooler\.", r"^cls\."),
    # As Nomic's own code saves it.
    renames=(
        (r"(^|\.)encoder\.layers\.", r"\1layers."),
        (r"(^|\.)emb_ln\.", r"\1embeddings.LayerNorm."),
        (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.fc11\.", ".up_proj."),
        (r"\.fc12\.", ".gate_proj."),
        (r"\.fc2\.", ".down_proj."),
        (r"\.norm1\.", ".post_attention_layernorm."),
        (r"\.norm2\.", ".post_mlp_layernorm."),
    ),
)
_OLD_KEYS = {
    "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size", "layer_norm_epsilon": "layer_norm_eps", "rotary_emb_base": "rope_theta",
    "rotary_emb_fraction": "partial_rotary_factor", "max_trained_positions": "max_position_embeddings",
}  # fmt: skip


def to_spec(config: HFConfig) -> ModelSpec:
    """Takes the keys of Nomic's own code, which are GPT-2's, as well."""
    if "n_embd" in config:
        config = config.replace(hidden_act="silu").with_defaults(
            **{new: config[old] for old, new in _OLD_KEYS.items() if old in config}
        )
    config = config.with_defaults(
        vocab_size=30528, hidden_act="silu", max_position_embeddings=2048, rope_theta=1000.0, hidden_size=768,
        num_attention_heads=12,
    )  # fmt: skip
    spec = bert_like(config, pooler=two_layer_head(config, ("pooler", "classifier"), "tanh"))
    head_dim = config.size("head_dim", spec.layers[0].attn.head_dim)
    rope = read_rope(config, head_dim)
    spec = replace_layers(
        spec,
        lambda layer: {
            "attn": dataclasses.replace(
                layer.attn, head_dim=head_dim, scale=head_dim**-0.5, rope=rope, qkv_bias=False, o_bias=False
            ),
            "mlp": dataclasses.replace(layer.mlp, gated=True, bias=False),
        },
    )
    return dataclasses.replace(spec, num_learned_positions=0)
