"""Llama 4, text only: every fourth layer without rope, experts beside a shared one, weights on their input."""

import dataclasses

from ...weights.names import Stored
from ..config import HFConfig
from ..llama_like import llama_like, replace_attention, replace_mlp, turn_only, turn_pairs
from ..mixtures import read_experts, replace_with_experts
from ..name_tables import llama_names
from ..spec import LayerSpec, MlpSpec, ModelSpec, NormSpec

_FF = "feed_forward."
WEIGHTS = llama_names(
    {
        **{f"mlp.{name}_proj": f"{_FF}{name}_proj" for name in ("gate", "up", "down")},
        **{f"mlp.shared.{name}_proj": f"{_FF}shared_expert.{name}_proj" for name in ("gate", "up", "down")},
        "mlp.router": f"{_FF}router",
    },
    tensors={
        "mlp.experts.gate_up_proj.weight": Stored(name=f"{_FF}experts.gate_up_proj", transpose=True, stacked=True),
        "mlp.experts.down_proj.weight": Stored(name=f"{_FF}experts.down_proj", transpose=True, stacked=True),
    },
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Layers with rope see chunks of `attention_chunk_size` tokens: the context is one chunk, where that is all."""
    config = config.with_defaults(
        num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, hidden_act="silu", rope_theta=500000.0,
        num_local_experts=16, num_experts_per_tok=1, intermediate_size_mlp=16384,
    )  # fmt: skip
    num_layers, interval = config.num_layers(), config.size("no_rope_layer_interval", 4)
    has_rope = config.flags("no_rope_layers") or tuple((i + 1) % interval != 0 for i in range(num_layers))
    spec = turn_pairs(llama_like(config, rms_norm_eps=1e-5))
    spec = turn_only(replace_mlp(spec, intermediate_size=config.size("intermediate_size_mlp")), has_rope)
    bias = config.boolean("attention_bias", False)
    spec = replace_attention(spec, qkv_bias=bias, o_bias=bias)
    norm = NormSpec(eps=spec.norm.eps, weight=False) if config.boolean("use_qk_norm", True) else None
    grows = config.boolean("attn_temperature_tuning", True)
    scale, length = config.number("attn_scale", 0.1), config.size("floor_scale", 8192)

    def finish(layer: LayerSpec) -> LayerSpec:
        if layer.attn.rope is not None:
            attn = dataclasses.replace(layer.attn, qk_norm=norm, norm_after_rope=True)
        elif grows:
            attn = dataclasses.replace(
                layer.attn, temperature_scale=scale, temperature_length=length, temperature_shift=1
            )
        else:
            attn = layer.attn
        return dataclasses.replace(layer, attn=attn)

    longest = min(spec.max_position_embeddings, config.size("attention_chunk_size", 8192))
    layers = tuple(finish(layer) for layer in spec.layers)
    spec = dataclasses.replace(spec, layers=layers, max_position_embeddings=longest)
    size = config.size("intermediate_size")
    moe = read_experts(
        config,
        size="intermediate_size",
        score="sigmoid",
        renormalize=False,
        scale_input=True,
        shared=MlpSpec(intermediate_size=size, activation=spec.layers[0].mlp.activation),
    )
    step, listed = config.size("interleave_moe_layer_step", 1), config.get("moe_layers")
    is_sparse = [i in listed if isinstance(listed, list) else (i + 1) % step == 0 for i in range(num_layers)]
    return replace_with_experts(spec, moe, is_sparse)
