"""LFM3: LFM2 with windows, norms around both blocks, and a gate for each head."""

from ..config import HFConfig
from ..llama_like import FULL, replace_attention, replace_layers
from ..name_tables import llama_names
from ..spec import ModelSpec
from . import lfm2

WEIGHTS = llama_names(
    {
        **lfm2.NAMES,
        **{f"attn.{name}": f"self_attn.{name}" for name in ("q_norm", "k_norm", "o_proj", "gate_proj")},
        "attn_post_norm": "post_operator_norm",
        "mlp_post_norm": "post_ffn_norm",
    }
)
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
}
_KINDS = ("sliding_attention", "conv", "full_attention", "conv")
"""Four layers in a row, where a config lists none; the first of all is a convolution."""


def to_spec(config: HFConfig) -> ModelSpec:
    """LFM2 with those."""
    kinds = config.texts("layer_types") or [_KINDS[i % 4] if i else "conv" for i in range(config.num_layers())]
    config = config.replace(layer_types=list(kinds)).with_defaults(
        num_key_value_heads=4, head_dim=128, conv_L_cache=7, sliding_window=256, rope_parameters=_ROPES,
    )  # fmt: skip
    spec = lfm2.lfm2_like(config, [FULL if kind == "conv" else kind for kind in kinds])
    bias, gated = config.boolean("attention_bias", False), config.boolean("use_attention_gate", True)
    spec = replace_attention(spec, qkv_bias=bias, o_bias=bias, gated=gated, gate_by_head=gated)
    has_norms = config.boolean("use_sandwich_norm", True)
    return replace_layers(spec, lambda layer: {"post_norm": has_norms})
