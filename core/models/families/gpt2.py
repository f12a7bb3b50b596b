"""GPT-2: layer norms, learned positions, biases everywhere, linears stored as [in_features, out_features]."""

from ...errors import ModelError
from ...weights.names import Stored
from ..config import HFConfig
from ..llama_like import read_activation
from ..name_tables import name_table
from ..spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec

WEIGHTS = name_table(
    {
        "embed_tokens": "transformer.wte",
        "embed_positions": "transformer.wpe",
        "attn_norm": "ln_1",
        "attn.qkv_proj": Stored(name="attn.c_attn", transpose=True),
        "attn.o_proj": Stored(name="attn.c_proj", transpose=True),
        "mlp_norm": "ln_2",
        "mlp.up_proj": Stored(name="mlp.c_fc", transpose=True),
        "mlp.down_proj": Stored(name="mlp.c_proj", transpose=True),
        "final_norm": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    layer="transformer.h.{i}.",
    base_prefix="transformer.",
    ignore=(r"\.attn\.(masked_)?bias$", r"^lm_head\.weight$"),
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Sizes are called n_embd, n_head, n_layer, n_positions and n_inner here."""
    if config.get("add_cross_attention"):
        raise ModelError(f"{config.file} asks for cross attention, which gpt2 does not serve")
    hidden_size, num_heads = config.size("n_embd"), config.size("n_head")
    if hidden_size % num_heads:
        raise ModelError(f"n_embd ({hidden_size}) in {config.file} is no multiple of n_head ({num_heads})")
    head_dim, num_positions = hidden_size // num_heads, config.size("n_positions", 1024)
    config = config.with_defaults(activation_function="gelu_new")
    mlp = MlpSpec(
        intermediate_size=config.size("n_inner", 4 * hidden_size),
        activation=read_activation(config, "activation_function"),
        gated=False,
        bias=True,
    )
    scale = head_dim**-0.5 if config.boolean("scale_attn_weights", True) else 1.0
    by_layer = config.boolean("scale_attn_by_inverse_layer_idx", False)
    return ModelSpec(
        model_type=config.model_type,
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden_size,
        max_position_embeddings=num_positions,
        layers=tuple(
            LayerSpec(
                attn=AttentionSpec(
                    num_heads=num_heads,
                    num_kv_heads=num_heads,
                    head_dim=head_dim,
                    scale=scale / (i + 1) if by_layer else scale,
                    qkv_bias=True,
                    o_bias=True,
                ),
                mlp=mlp,
            )
            for i in range(config.num_layers("n_layer"))
        ),
        norm=NormSpec(kind="layer", eps=config.number("layer_norm_epsilon", 1e-5), bias=True),
        num_learned_positions=num_positions,
        tie_word_embeddings=config.boolean("tie_word_embeddings", True),
        dtype=config.dtype,
    )
