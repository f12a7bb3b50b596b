"""Bamba: Llama with Mamba-2 in the place of most attention layers."""

from ...errors import ModelError
from ..config import HFConfig
from ..hybrids import mixer_modules, mixer_tensors, read_mamba2, replace_with_mixers
from ..llama_like import llama_like, with_biases
from ..name_tables import llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names(
    {
        **mixer_modules("mamba."),
        **{f"mlp.{name}_proj": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
        "mlp_norm": "pre_ff_layernorm",
        "final_norm": "model.final_layernorm",
    },
    tensors=mixer_tensors("mamba."),
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Attention, half of each head turned, in the layers that are listed."""
    config = config.with_defaults(
        num_key_value_heads=8, max_position_embeddings=262144, hidden_act="silu", partial_rotary_factor=0.5
    )
    attention = config.get("attn_layer_indices") or ()
    if not isinstance(attention, list | tuple):
        raise ModelError(f"attn_layer_indices in {config.file} must be a list of layers, got {attention!r}")
    spec = llama_like(config, rms_norm_eps=1e-5)
    spec = with_biases(spec, attention=config.boolean("attention_bias", False), mlp=config.boolean("mlp_bias", False))
    is_recurrent = [i not in attention for i in range(spec.num_layers)]
    return replace_with_mixers(spec, read_mamba2(config, spec.norm), is_recurrent)
