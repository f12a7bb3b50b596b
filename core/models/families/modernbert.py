"""ModernBERT (Warner et al. 2024): norms before the blocks, gated feed-forward, rope, layers with a window."""

from ..bert_like import encoder_names, read_head_dim, two_layer_head
from ..config import HFConfig
from ..llama_like import FULL, SLIDING, read_activation, read_rope
from ..spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec, PoolerSpec, Pooling

MODULES = {
    "embed_tokens": "model.embeddings.tok_embeddings",
    "embed_norm": "model.embeddings.norm",
    "attn_norm": "attn_norm",
    "attn.o_proj": "attn.Wo",
    "mlp_norm": "mlp_norm",
    "mlp.gate_up_proj": "mlp.Wi",
    "mlp.down_proj": "mlp.Wo",
    "final_norm": "model.final_norm",
}
WEIGHTS = encoder_names(
    {**MODULES, "attn.qkv_proj": "attn.Wqkv"},
    {"dense": "head.dense", "dense_norm": "head.norm", "classifier": "classifier"},
    layer="model.layers.{i}.",
    prefix="model.",
    ignore=(r"^(head|decoder)\.", r"inv_freq$"),
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Every third layer sees all tokens, the others `local_attention` / 2 on either side."""
    config = config.with_defaults(
        vocab_size=50368, hidden_size=768, intermediate_size=1152, num_hidden_layers=22, num_attention_heads=12,
        hidden_activation="gelu", max_position_embeddings=8192, local_attention=128, norm_eps=1e-5,
        classifier_pooling="cls", classifier_activation="gelu",
    )  # fmt: skip
    num_layers, num_heads, head_dim = config.num_layers(), config.size("num_attention_heads"), read_head_dim(config)
    every = config.size("global_attn_every_n_layers", 3)
    kinds = config.texts("layer_types") or tuple(SLIDING if i % every else FULL for i in range(num_layers))
    bias, ropes = config.boolean("attention_bias", False), _with_ropes(config)
    attention = {
        kind: AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rope=read_rope(ropes, head_dim, kind),
            window=config.size("local_attention") // 2 + 1 if kind == SLIDING else 0,
            qkv_bias=bias,
            o_bias=bias,
        )
        for kind in (FULL, SLIDING)
    }
    mlp = MlpSpec(
        intermediate_size=config.size("intermediate_size"),
        activation=read_activation(config, "hidden_activation"),
        bias=config.boolean("mlp_bias", False),
    )
    norm = NormSpec(kind="layer", eps=config.number("norm_eps"), bias=config.boolean("norm_bias", False))
    return ModelSpec(
        model_type=config.model_type,
        vocab_size=config.size("vocab_size"),
        hidden_size=config.size("hidden_size"),
        max_position_embeddings=config.size("max_position_embeddings"),
        # The embedding's norm stands for that of the first attention.
        layers=tuple(LayerSpec(attn=attention[kind], mlp=mlp, attn_pre_norm=i > 0) for i, kind in enumerate(kinds)),
        norm=norm,
        kind="encoder",
        embed_norm=True,
        dtype=config.dtype,
        pooler=_head(config, norm),
    )


def _head(config: HFConfig, norm: NormSpec) -> PoolerSpec | None:
    kind: Pooling = "mean" if config.text("classifier_pooling") == "mean" else "cls"
    activation = read_activation(config, "classifier_activation")
    bias = config.boolean("classifier_bias", False)
    return two_layer_head(config, ("dense", "classifier"), activation, kind, bias=bias, norm=norm)


def _with_ropes(config: HFConfig) -> HFConfig:
    """Rope parameters for each kind of layer; older files have two thetas at the top."""
    stated = HFConfig(config.mapping("rope_parameters"), file=f"rope_parameters of {config.file}")
    thetas = {
        FULL: config.number("global_rope_theta", 160_000.0),
        SLIDING: config.number("local_rope_theta", 10_000.0, null=config.number("global_rope_theta", 160_000.0)),
    }
    ropes = {
        kind: {"rope_theta": theta, **config.mapping("rope_scaling"), **stated.mapping(kind)}
        for kind, theta in thetas.items()
    }
    return config.replace(rope_scaling=None, rope_parameters=ropes)
