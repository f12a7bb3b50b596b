"""Zamba: Mamba whose channels stand in groups, and now and then a shared transformer block before it."""

import dataclasses

from ...weights.names import Stored
from ..config import HFConfig
from ..hybrids import mixer_modules, mixers_alone, read_mamba
from ..llama_like import read_activation
from ..name_tables import llama_names
from ..spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, SharedSpec

_AT = "shared_transf."
WEIGHTS = llama_names(
    {
        **mixer_modules("mamba."), "mixer.in_proj": Stored(name="mamba.in_proj", interleaved=True),
        "shared.out_proj": "linear",
        "shared.attn_norm": f"{_AT}input_layernorm", "shared.mlp_norm": f"{_AT}pre_ff_layernorm",
        **{f"shared.attn.{name}_proj": f"{_AT}self_attn.{name}_proj" for name in "qkvo"},
        **{f"shared.mlp.{name}_proj": f"{_AT}feed_forward.{name}_proj" for name in ("gate", "up", "down")},
    },
    tensors={
        "mixer.x_proj.weight": Stored(name="mamba.x_proj_weight", stacked=True),
        "mixer.dt_proj.weight": Stored(name="mamba.dt_proj_weight", stacked=True),
        **{
            f"mixer.{ours}": Stored(name=f"mamba.{theirs}", reshape=True)
            for ours, theirs in (("a_log", "A_log"), ("d", "D"), ("dt_bias", "dt_proj_bias"))
        },
    },
    renames=((r"\.mamba_decoder\.", "."),),
)  # fmt: skip


def to_spec(config: HFConfig) -> ModelSpec:
    """Layers with a block share one, kept with the first of them; without tied embeddings, nothing is shared in
    transformers."""
    config = config.with_defaults(
        num_hidden_layers=76, num_attention_heads=16, num_key_value_heads=16, hidden_act="gelu", n_mamba_heads=2,
        hidden_mamba_act="silu", max_position_embeddings=4096, attn_layer_period=6, attn_layer_offset=4,
    )  # fmt: skip
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    mixer = read_mamba(config.replace(hidden_act=config["hidden_mamba_act"]))
    mixer = dataclasses.replace(mixer, num_key_heads=config.size("n_mamba_heads"))
    head_dim = config.size("attention_head_dim", 2 * hidden_size // num_heads)
    attn = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=config.size("num_key_value_heads"),
        head_dim=head_dim,
        scale=(head_dim / 2) ** -0.5,
    )
    mlp = MlpSpec(
        intermediate_size=config.size("intermediate_size", 14848), activation=read_activation(config, "hidden_act")
    )
    period, offset = config.size("attn_layer_period"), config.integer("attn_layer_offset")
    kinds = config.texts("layers_block_type") or [
        "hybrid" if i == 2 or (i > 2 and (i - 3) % period == offset) else "mamba" for i in range(config.num_layers())
    ]
    first = next((i for i, kind in enumerate(kinds) if kind == "hybrid"), 0)
    is_tied, layers = config.boolean("tie_word_embeddings", True), []
    for i in range(config.num_layers()):
        shared = SharedSpec(mlp=mlp, owner=first if is_tied else i, number=0)
        has_block = kinds[i] == "hybrid"
        layers.append(LayerSpec(mixer=mixer, attn=attn, shared=shared) if has_block else LayerSpec(mixer=mixer))
    spec = mixers_alone(config.replace(layer_norm_epsilon=config.number("rms_norm_eps", 1e-5)), mixer)
    return dataclasses.replace(spec, layers=tuple(layers))
