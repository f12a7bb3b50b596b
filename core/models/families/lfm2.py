"""LFM2: short convolutions between two gates, and an attention layer with normalised heads now and then."""

from collections.abc import Sequence

from ..config import HFConfig
from ..hybrids import recurrent_layers, replace_with_mixers
from ..llama_like import llama_like, replace_attention
from ..name_tables import llama_names
from ..spec import MixerSpec, ModelSpec

FF = "feed_forward."
NAMES = {
    "mixer.in_proj": "conv.in_proj", "mixer.conv": "conv.conv", "mixer.out_proj": "conv.out_proj",
    "attn.o_proj": "self_attn.out_proj", **{f"attn.{name}_norm": f"self_attn.{name}_layernorm" for name in "qk"},
    "mlp.gate_proj": f"{FF}w1", "mlp.up_proj": f"{FF}w3", "mlp.down_proj": f"{FF}w2",
    "attn_norm": "operator_norm", "mlp_norm": "ffn_norm", "final_norm": "model.embedding_norm",
}  # fmt: skip
WEIGHTS = llama_names(NAMES)


def to_spec(config: HFConfig) -> ModelSpec:
    """The feed-forward size is two thirds of what is stated, rounded up, if `block_auto_adjust_ff_dim`."""
    config = config.alias(intermediate_size="block_ff_dim", tie_word_embeddings="tie_embedding")
    size = config.size("intermediate_size", 12288)
    if config.boolean("block_auto_adjust_ff_dim", True):
        size, multiple = int(2 * size / 3), config.size("block_multiple_of", 256)
        size = multiple * -(-int(config.number("block_ffn_dim_multiplier", 1.0, null=1.0) * size) // multiple)
    return lfm2_like(config.replace(intermediate_size=size))


def lfm2_like(config: HFConfig, layer_types: Sequence[str] = ()) -> ModelSpec:
    """What all LFMs share. layer_types: of attention, as llama_like takes them."""
    config = config.with_defaults(
        num_key_value_heads=8, max_position_embeddings=128000, tie_word_embeddings=True, rope_theta=1000000.0
    )
    spec = llama_like(
        config.replace(hidden_act="silu", rms_norm_eps=config.number("norm_eps", 1e-5)), layer_types=layer_types
    )
    bias, attention = config.boolean("conv_bias", False), config.get("full_attn_idxs")
    mixer = MixerSpec(
        kind="conv",
        num_heads=spec.hidden_size,
        head_dim=1,
        conv_width=config.size("conv_L_cache", 3),
        bias=bias,
        out_bias=bias,
        conv_bias=bias,
    )
    is_recurrent = recurrent_layers(config, "layer_types")
    is_recurrent = is_recurrent or [attention is not None and i not in attention for i in range(spec.num_layers)]
    return replace_with_mixers(replace_attention(spec, qk_norm=spec.norm), mixer, is_recurrent)
