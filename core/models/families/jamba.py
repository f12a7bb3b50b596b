"""Jamba: Mamba, an attention layer without rope now and then, experts in every other layer."""

from ..config import HFConfig
from ..hybrids import mixer_modules, mixer_tensors, read_mamba, recurrent_layers, replace_with_mixers
from ..llama_like import llama_like, turn_only
from ..mixtures import read_experts, replace_with_experts
from ..name_tables import llama_names
from ..spec import ModelSpec

_FF = "feed_forward."
WEIGHTS = llama_names(
    {
        **mixer_modules("mamba.", x_proj="x_proj", dt_proj="dt_proj"),
        **{f"mixer.{name}_norm": f"mamba.{name}_layernorm" for name in ("dt", "b", "c")},
        **{f"mlp.{name}_proj": f"{_FF}{name}_proj" for name in ("gate", "up", "down")},
        **{f"mlp.experts.{{j}}.{name}_proj": f"{_FF}experts.{{j}}.{name}_proj" for name in ("gate", "up", "down")},
        "mlp.router": f"{_FF}router",
        "mlp_norm": "pre_ff_layernorm",
        "final_norm": "model.final_layernorm",
    },
    tensors=mixer_tensors("mamba.", dt_bias="dt_proj.bias"),
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Which layers are which is stated by period and offset."""
    config = config.with_defaults(
        num_key_value_heads=8, max_position_embeddings=262144, hidden_act="silu", num_experts=16,
        num_experts_per_tok=2,
    )  # fmt: skip
    layers = range(config.num_layers())
    period, offset = config.size("attn_layer_period", 8), config.integer("attn_layer_offset", 4)
    spec = turn_only(llama_like(config), [False] * len(layers))
    is_recurrent = recurrent_layers(config, "layers_block_type") or [i % period != offset for i in layers]
    spec = replace_with_mixers(spec, read_mamba(config, spec.norm), is_recurrent)
    period, offset = config.size("expert_layer_period", 2), config.integer("expert_layer_offset", 1)
    if config.size("num_experts") == 1:
        return spec
    moe = read_experts(config, size="intermediate_size", renormalize=False)
    kinds = config.texts("mlp_layer_types") or ["sparse" if i % period == offset else "dense" for i in layers]
    return replace_with_experts(spec, moe, [kind == "sparse" for kind in kinds])
