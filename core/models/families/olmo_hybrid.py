"""OLMo Hybrid: OLMo 2's layers, three quarters of which have the gated delta rule and norms before their blocks."""

import dataclasses

from ...weights.names import Stored
from ..config import HFConfig
from ..dense_families import olmo2_like
from ..hybrids import delta_modules, mixer_tensors, read_delta, recurrent_layers, replace_with_mixers
from ..llama_like import replace_layers, turn_only
from ..name_tables import SANDWICH, llama_names
from ..spec import ModelSpec, NormSpec

_AT = "linear_attn."
WEIGHTS = llama_names(
    {
        **SANDWICH,
        **delta_modules(_AT, z="g", beta="b", dt="a"),
        "attn_norm": Stored(name="input_layernorm", also=("attention_layer_norm",)),
        **dict.fromkeys(
            ("mlp_norm", "attn_post_norm"),
            Stored(name="post_attention_layernorm", also=("feedforward_layer_norm",)),
        ),
    },
    tensors=mixer_tensors(_AT),
)


def to_spec(config: HFConfig) -> ModelSpec:
    """No rope where `rope_theta` among the rope parameters is null."""
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    config = config.with_defaults(max_position_embeddings=65536, rms_norm_eps=1e-6)
    num_key_heads = config.size("linear_num_key_heads", num_heads)
    key_dim = config.size("linear_key_head_dim", int(0.75 * hidden_size / num_key_heads))
    config = config.replace(
        linear_num_key_heads=num_key_heads,
        linear_num_value_heads=config.size("linear_num_value_heads", num_heads),
        linear_key_head_dim=key_dim,
        linear_value_head_dim=config.size("linear_value_head_dim", 2 * key_dim),
        linear_conv_kernel_dim=config.size("linear_conv_kernel_dim", 4),
    )
    has_rope, num_layers = config.mapping("rope_parameters").get("rope_theta", 0.0) is not None, config.num_layers()
    spec = olmo2_like(config if has_rope else config.replace(rope_parameters=None))
    spec = turn_only(spec, [has_rope] * num_layers)
    is_recurrent = recurrent_layers(config, "layer_types") or [
        i % 4 != 3 and (num_layers > 3 or i < num_layers - 1) for i in range(num_layers)
    ]
    scale = 2.0 if config.boolean("linear_allow_neg_eigval", True) else 1.0
    mixer = dataclasses.replace(read_delta(config, NormSpec(eps=1e-5)), beta_scale=scale)
    spec = replace_with_mixers(spec, mixer, is_recurrent)
    return replace_layers(spec, lambda layer: {"pre_norm": layer.mixer is not None, "post_norm": layer.mixer is None})
