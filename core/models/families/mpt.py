"""MPT: ALiBi, layer norms without biases, fused qkv that may be clipped."""

from ...errors import ModelError
from ..config import HFConfig
from ..llama_like import layer_norm, llama_like, replace_attention, replace_mlp, turn_only
from ..name_tables import IGNORE, name_table
from ..spec import ModelSpec

WEIGHTS = name_table(
    {
        "embed_tokens": "transformer.wte",
        "attn_norm": "norm_1",
        "attn.qkv_proj": "attn.Wqkv",
        "attn.o_proj": "attn.out_proj",
        "mlp_norm": "norm_2",
        "mlp.up_proj": "ffn.up_proj",
        "mlp.down_proj": "ffn.down_proj",
        "final_norm": "transformer.norm_f",
        "lm_head": "lm_head",
    },
    layer="transformer.blocks.{i}.",
    base_prefix="transformer.",
    ignore=IGNORE,
)


def to_spec(config: HFConfig) -> ModelSpec:
    """What attention does is in attn_config; only what transformers' class serves is."""
    attn = HFConfig(config.mapping("attn_config"), file=f"attn_config of {config.file}")
    for key, served in (
        ("alibi", True),
        ("qk_ln", False),
        ("attn_type", "multihead_attention"),
        ("prefix_lm", False),
    ):
        if attn.get(key, served) != served:
            raise ModelError(f"{key} in {attn.file} must be {served!r}, got {attn.get(key)!r}")
    if not config.boolean("no_bias", True):
        raise ModelError(f"{config.file} asks for biases (no_bias: false), which are not served")
    config = config.alias(
        hidden_size="d_model", num_hidden_layers="n_layers", num_attention_heads="n_heads",
        max_position_embeddings="max_seq_len",
    )  # fmt: skip
    config = config.with_defaults(max_position_embeddings=2048, tie_word_embeddings=True, hidden_act="gelu").replace(
        intermediate_size=config.size("expansion_ratio", 4) * config.size("hidden_size")
    )
    spec = llama_like(config, norm=layer_norm(config, "layer_norm_epsilon", bias=False))
    spec = replace_mlp(turn_only(spec, [False] * spec.num_layers), gated=False)
    return replace_attention(
        spec,
        alibi_max_bias=attn.positive("alibi_bias_max", 8.0),
        clip_qkv=attn.number("clip_qkv", 0.0, null=0.0),
        scale=attn.number("softmax_scale", spec.layers[0].attn.scale, null=spec.layers[0].attn.scale),
    )
