"""DistilBERT (Sanh et al. 2019): BERT without token types, and with names of its own."""

from ..bert_like import bert_like, encoder_names, two_layer_head
from ..config import HFConfig
from ..spec import ModelSpec

WEIGHTS = encoder_names(
    {
        "embed_tokens": "distilbert.embeddings.word_embeddings",
        "embed_positions": "distilbert.embeddings.position_embeddings",
        "embed_norm": "distilbert.embeddings.LayerNorm",
        "attn.q_proj": "attention.q_lin",
        "attn.k_proj": "attention.k_lin",
        "attn.v_proj": "attention.v_lin",
        "attn.o_proj": "attention.out_lin",
        "attn_post_norm": "sa_layer_norm",
        "mlp.up_proj": "ffn.lin1",
        "mlp.down_proj": "ffn.lin2",
        "mlp_post_norm": "output_layer_norm",
    },
    {"pre_classifier": "pre_classifier", "classifier": "classifier"},
    layer="distilbert.transformer.layer.{i}.",
    prefix="distilbert.",
    ignore=(r"position_ids$", r"^vocab_(transform|layer_norm|projector)\."),
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Sizes are called dim, n_heads, n_layers and hidden_dim here; positions are learned or stored sinusoids."""
    config = config.with_defaults(vocab_size=30522, hidden_dim=3072, activation="gelu")
    own = {
        ours: config.get(theirs, config.get(ours, default))
        for ours, theirs, default in (
            ("hidden_size", "dim", 768),
            ("num_attention_heads", "n_heads", 12),
            ("num_hidden_layers", "n_layers", 6),
        )
    }
    config = config.replace(
        intermediate_size=config["hidden_dim"],
        hidden_act=config["activation"],
        layer_norm_eps=1e-12,
        type_vocab_size=0,
        **own,
    )
    return bert_like(config, pooler=two_layer_head(config, ("pre_classifier", "classifier"), "relu"))
