"""Mamba: a selective state space for each channel, and nothing else."""

from ..config import HFConfig
from ..hybrids import mixer_modules, mixer_tensors, mixers_alone, read_mamba
from ..name_tables import name_table
from ..spec import ModelSpec, NormSpec

BACKBONE = {
    "embed_tokens": "backbone.embeddings", "final_norm": "backbone.norm_f", "lm_head": "lm_head", "attn_norm": "norm",
}  # fmt: skip
RENAMES = ((r"\bembedding\.weight$", "embeddings.weight"),)
"""How the first checkpoints spell the embedding."""
WEIGHTS = name_table(
    {**BACKBONE, **mixer_modules("mixer.", x_proj="x_proj", dt_proj="dt_proj")},
    layer="backbone.layers.{i}.",
    tensors=mixer_tensors("mixer.", dt_bias="dt_proj.bias"),
    base_prefix="backbone.",
)


def with_mamba_keys(config: HFConfig) -> HFConfig:
    """The config with its keys spelled as Jamba does."""
    return config.alias(
        mamba_d_state="state_size", mamba_d_conv="conv_kernel", mamba_expand="expand", mamba_dt_rank="time_step_rank",
        mamba_proj_bias="use_bias", mamba_conv_bias="use_conv_bias",
    )  # fmt: skip


def to_spec(config: HFConfig) -> ModelSpec:
    """One mixer a layer."""
    return mamba_like(config, None)


def mamba_like(config: HFConfig, norm: NormSpec | None) -> ModelSpec:
    """Mamba with a norm of step size, b and c; `intermediate_size` wins over `expand`."""
    size = config.integer("intermediate_size", 0)
    return mixers_alone(config, read_mamba(with_mamba_keys(config), norm, size=size))
