"""Zamba 2: Mamba-2, and now and then a shared transformer block before it, adapted by each layer that takes it."""

import dataclasses

from ..config import HFConfig
from ..hybrids import mixers_alone, read_mamba2
from ..llama_like import read_activation, read_rope
from ..name_tables import llama_names
from ..spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec, SharedSpec

_AT = "shared_transformer."
WEIGHTS = llama_names(
    {
        "shared.out_proj": "linear",
        "shared.attn_norm": f"{_AT}input_layernorm", "shared.mlp_norm": f"{_AT}pre_ff_layernorm",
        **{f"shared.attn.{name}_proj": f"{_AT}self_attn.{name}_proj" for name in "qkvo"},
        **{f"shared.mlp.{name}_proj": f"{_AT}feed_forward.{name}_proj" for name in ("gate_up", "down")},
        **{
            f"shared.attn.{name}_adapter_{way}.{{j}}": f"{_AT}self_attn.linear_{name}_adapter_list.{{j}}.{n}"
            for name in "qkv"
            for n, way in enumerate(("in", "out"))
        },
        **{
            f"shared.mlp.adapter_{way}.{{j}}": f"{_AT}feed_forward.gate_up_proj_adapter_list.{{j}}.{n}"
            for n, way in enumerate(("in", "out"))
        },
    },
    renames=((r"\.mamba_decoder\.", "."),),
)  # fmt: skip
_HYBRID = (6, 12, 18, 24, 30, 36, 42, 47, 51)
"""Layers with a block, where a config lists none."""


def to_spec(config: HFConfig) -> ModelSpec:
    """The n-th layer with a block takes the block n modulo `num_mem_blocks`, kept with its first layer; without tied
    embeddings, nothing is shared in transformers."""
    config = config.with_defaults(
        num_hidden_layers=54, hidden_act="gelu", mamba_d_state=64, max_position_embeddings=4096, n_mamba_heads=8,
        mamba_ngroups=1, add_bias_linear=False, adapter_rank=128,
    )  # fmt: skip
    config = config.alias(
        mamba_n_heads="n_mamba_heads", mamba_n_groups="mamba_ngroups", mamba_proj_bias="add_bias_linear"
    )
    if config.boolean("use_long_context", False):
        config = config.replace(max_position_embeddings=16384)
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads", 32)
    limit = (config.number("time_step_min", 0.001), float("inf"))
    mixer = read_mamba2(config.replace(mamba_conv_bias=True, hidden_act="silu"), NormSpec(eps=1e-5))
    mixer = dataclasses.replace(mixer, dt_limit=limit)
    head_dim = config.size("attention_head_dim", 2 * hidden_size // num_heads)
    attn = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=config.size("num_key_value_heads", num_heads),
        head_dim=head_dim,
        scale=(head_dim / 2) ** -0.5,
        rope=read_rope(config, head_dim) if config.boolean("use_mem_rope", False) else None,
    )
    mlp = MlpSpec(
        intermediate_size=config.integer("intermediate_size", 0, null=0) or 4 * hidden_size,
        activation=read_activation(config, "hidden_act"),
        bias=config.boolean("add_bias_linear"),
    )
    types, num_blocks = config.texts("layers_block_type"), config.size("num_mem_blocks", 1)
    owners = [i for i, kind in enumerate(types) if kind == "hybrid"] if types else list(_HYBRID)
    layers = []
    for i in range(config.num_layers()):
        layer = LayerSpec(mixer=mixer)
        if i in owners:
            number = owners.index(i)
            shared = SharedSpec(
                mlp=mlp,
                owner=owners[number % num_blocks] if config.boolean("tie_word_embeddings", True) else i,
                number=number,
                adapter_rank=config.size("adapter_rank"),
                has_attn_adapter=config.boolean("use_shared_attention_adapter", False),
            )
            layer = dataclasses.replace(layer, attn=attn, shared=shared)
        layers.append(layer)
    spec = mixers_alone(config.replace(layer_norm_epsilon=config.number("rms_norm_eps", 1e-5)), mixer)
    return dataclasses.replace(spec, layers=tuple(layers))
