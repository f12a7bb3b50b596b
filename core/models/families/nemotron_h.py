"""Nemotron-H and Nemotron 3: each layer is Mamba-2, attention without rope, a squared-ReLU block or experts."""

import dataclasses

from ...errors import ModelError
from ...weights.names import Stored
from ..config import HFConfig
from ..hybrids import BACKBONE, mixer_modules, mixer_tensors, read_mamba2
from ..llama_like import llama_like, read_activation
from ..mixtures import read_deepseek_experts
from ..name_tables import name_table
from ..spec import LayerSpec, MlpSpec, ModelSpec, NormSpec

_KINDS = {
    "M": "mamba", "linear_attention": "mamba", "*": "attention", "full_attention": "attention", "-": "mlp",
    "E": "moe",
}  # fmt: skip
_SHARED, _EXPERT = "mixer.shared_experts.", "mixer.experts.{j}."
WEIGHTS = name_table(
    {
        **BACKBONE, **mixer_modules("mixer."), "mlp_norm": "norm",
        **{f"attn.{name}_proj": f"mixer.{name}_proj" for name in "qkvo"},
        **{f"mlp.{name}_proj": f"mixer.{name}_proj" for name in ("up", "down")},
        **{f"mlp.shared.{name}_proj": f"{_SHARED}{name}_proj" for name in ("up", "down")},
        **{f"mlp.experts.{{j}}.{name}_proj": f"{_EXPERT}{name}_proj" for name in ("up", "down")},
        "mlp.router": "mixer.gate", "mlp.latent_in": "mixer.fc1_latent_proj",
        "mlp.latent_out": "mixer.fc2_latent_proj",
    },
    layer="backbone.layers.{i}.",
    tensors={
        **mixer_tensors("mixer."), "mlp.router.correction": "mixer.gate.e_score_correction_bias",
        **{
            f"mlp.experts.{name}_proj.weight": Stored(name=f"mixer.experts.{name}_proj", stacked=True)
            for name in ("up", "down")
        },
    },
    base_prefix="backbone.",
    ignore=(r"^mtp\.",),
    renames=((r"^model\.", "backbone."),),
)  # fmt: skip


def to_spec(config: HFConfig) -> ModelSpec:
    """The kinds of layers are listed, or spelled as a pattern of M, *, - and E."""
    listed = (
        config.texts("layers_block_type")
        or config.texts("layer_types")
        or tuple(config.text("hybrid_override_pattern", "ME*-"))
    )
    kinds = [_KINDS.get(kind, kind) for kind in listed]
    config = config.replace(tie_word_embeddings=False)  # whatever it says
    config = config.replace(num_hidden_layers=len(kinds), rms_norm_eps=config.number("layer_norm_epsilon", 1e-5))
    config = config.with_defaults(
        num_key_value_heads=8, head_dim=128, max_position_embeddings=4096, hidden_act="silu", mlp_hidden_act="relu2",
        mamba_num_heads=128, mamba_head_dim=64, n_groups=8, ssm_state_size=128, conv_kernel=4, use_bias=False,
        use_conv_bias=True, moe_intermediate_size=7688, moe_shared_expert_intermediate_size=7688, n_routed_experts=8,
        num_experts_per_tok=2, n_shared_experts=1,
    )  # fmt: skip
    config = config.alias(
        mamba_n_heads="mamba_num_heads", mamba_d_head="mamba_head_dim", mamba_n_groups="n_groups",
        mamba_d_state="ssm_state_size", mamba_d_conv="conv_kernel", mamba_proj_bias="use_bias",
        mamba_conv_bias="use_conv_bias",
    )  # fmt: skip
    spec = llama_like(config, has_rope="none")
    activation = read_activation(config, "mlp_hidden_act")
    mlp = MlpSpec(
        intermediate_size=config.size("intermediate_size"),
        activation=activation,
        gated=False,
        bias=config.boolean("mlp_bias", False),
    )
    norm = NormSpec(eps=spec.norm.eps)
    mixer = read_mamba2(config.replace(hidden_act=config.text("mamba_hidden_act", "silu")), norm)
    mixer = dataclasses.replace(mixer, dt_limit=(config.number("time_step_min", 0.001), float("inf")))
    layers = {
        "mamba": LayerSpec(mixer=mixer),
        "attention": LayerSpec(attn=spec.layers[0].attn),
        "mlp": LayerSpec(mlp=mlp),
    }
    if "moe" in kinds:
        shared = dataclasses.replace(mlp, intermediate_size=config.size("moe_shared_expert_intermediate_size"))
        latent = config.integer("moe_latent_size", 0, null=0)
        moe = read_deepseek_experts(config, activation=activation, gated=False, shared=shared, latent_size=latent)
        layers["moe"] = LayerSpec(moe=moe)
    if unknown := set(kinds) - set(layers):
        raise ModelError(
            f"{config.file} lists layers of the kind {sorted(unknown)[0]!r}, known are {', '.join(layers)}"
        )
    return dataclasses.replace(spec, layers=tuple(layers[kind] for kind in kinds))
