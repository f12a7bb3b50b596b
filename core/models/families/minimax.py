"""MiniMax-Text-01 and M1: lightning attention in most layers, a stream that goes on behind norms, experts."""

import dataclasses

from ...weights.names import Stored
from ..config import HFConfig
from ..hybrids import recurrent_layers
from ..llama_like import all_slide, llama_like, read_activation
from ..mixtures import read_experts, replace_with_experts
from ..name_tables import BLOCK_SPARSE_EXPERTS, llama_names
from ..spec import LayerSpec, MixerSpec, ModelSpec, NormSpec

_AT = "self_attn."
WEIGHTS = llama_names(
    {
        **BLOCK_SPARSE_EXPERTS,
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
    spec = llama_like(config, rms_norm_eps=1e-5, layer_types=all_slide)
    moe = read_experts(config, size="intermediate_size", weight_scale=config.number("mlp_beta_factor", 1.0))
    spec, attn, num_layers = replace_with_experts(spec, moe), spec.layers[0].attn, spec.num_layers
    is_linear = recurrent_layers(config, "layer_types") or [i % 2 == 1 for i in range(num_layers)]
    mixer = MixerSpec(
        kind="lightning",
        num_heads=attn.num_heads,
        activation=read_activation(config, "hidden_act"),
        head_dim=attn.head_dim,
        num_key_heads=attn.num_heads,
        state_size=attn.head_dim,
        norm=NormSpec(eps=1e-6),
        dt_limit=(1.0, 1.0),
    )

    def finish(i: int, layer: LayerSpec) -> LayerSpec:
        kind = "linear_attn" if is_linear[i] else "full_attn"
        beta = config.number(f"{kind}_beta_factor", 1.0)
        scales = (config.number(f"{kind}_alpha_factor", 1.0), config.number("mlp_alpha_factor", 1.0))
        if not is_linear[i]:
            return dataclasses.replace(layer, attn=dataclasses.replace(attn, out_scale=beta), stream_scales=scales)
        slope = 1 - i / (num_layers - 1 + 1e-5) + 1e-5
        own = dataclasses.replace(mixer, slope_scale=slope, out_scale=beta)
        return dataclasses.replace(layer, attn=LayerSpec().attn, mixer=own, stream_scales=scales)

    return dataclasses.replace(spec, layers=tuple(finish(i, layer) for i, layer in enumerate(spec.layers)))
