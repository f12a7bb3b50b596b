"""MiniMax-Text-01 and M1: lightning attention in most layers, a stream that goes on behind norms, experts."""

import dataclasses
from functools import partial

from ...weights.names import Stored
from ..config import HFConfig, number
from ..hybrids import recurrent_layers
from ..llama_like import ByLayer, all_slide, llama_like, read_activation
from ..mixtures import read_experts
from ..name_tables import llama_names
from ..spec import MixerSpec, ModelSpec, NormSpec

_AT = "self_attn."
WEIGHTS = llama_names(
    {
        "mixer.in_proj": Stored(name=f"{_AT}qkv_proj", interleaved=True),
        "mixer.out_proj": f"{_AT}out_proj",
        "mixer.gate_proj": f"{_AT}output_gate",
        "mixer.norm": f"{_AT}norm",
    },
    ignore=(r"\.self_attn\.(slope_rate|(query|key|diagonal)_decay)$",),  # buffers
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Lower layers forget faster; each kind of block has a factor of its output and one of the stream."""
    config = config.with_defaults(
        num_key_value_heads=8, max_position_embeddings=131072, hidden_act="silu", rope_theta=1000000.0,
        num_local_experts=8, num_experts_per_tok=2, sliding_window=None,
    )  # fmt: skip
    num_heads, num_layers = config.size("num_attention_heads"), config.num_layers()
    head_dim = config.size("head_dim", config.size("hidden_size") // num_heads or None)
    is_linear = recurrent_layers(config, "layer_types") or [i % 2 == 1 for i in range(num_layers)]
    kinds, mlp_alpha = ["linear" if flag else "full" for flag in is_linear], config.number("mlp_alpha_factor", 1.0)
    betas = [config.number(f"{kind}_attn_beta_factor", 1.0) for kind in kinds]
    mixer = MixerSpec(
        kind="lightning",
        num_heads=num_heads,
        activation=read_activation(config, "hidden_act"),
        head_dim=head_dim,
        num_key_heads=num_heads,
        state_size=head_dim,
        norm=NormSpec(eps=1e-6),
        dt_limit=(1.0, 1.0),
    )
    slopes = [1 - i / (num_layers - 1 + 1e-5) + 1e-5 for i in range(num_layers)]
    return llama_like(
        config,
        rms_norm_eps=1e-5,
        layer_types=all_slide,
        attn={"out_scale": ByLayer(betas)},
        moe=partial(read_experts, size="intermediate_size", weight_scale=number("mlp_beta_factor", 1.0)),
        mixer=ByLayer(
            dataclasses.replace(mixer, slope_scale=slope, out_scale=beta)
            for slope, beta in zip(slopes, betas, strict=True)
        ),
        is_recurrent=is_linear,
        layer={
            "stream_scales": ByLayer((config.number(f"{kind}_attn_alpha_factor", 1.0), mlp_alpha) for kind in kinds)
        },
    )
