"""Mamba-2: a state space with a scalar decay for each head, and nothing else."""

import dataclasses

from ..config import HFConfig
from ..hybrids import mixer_modules, mixer_tensors, mixers_alone, read_mamba2
from ..name_tables import name_table
from ..spec import ModelSpec, NormSpec
from .mamba import BACKBONE, RENAMES, with_mamba_keys

WEIGHTS = dataclasses.replace(
    name_table(
        {**BACKBONE, **mixer_modules("mixer.")},
        layer="backbone.layers.{i}.",
        tensors=mixer_tensors("mixer."),
        base_prefix="backbone.",
    ),
    renames=RENAMES,
)


def to_spec(config: HFConfig) -> ModelSpec:
    """One mixer a layer."""
    config = config.with_defaults(
        num_heads=128, head_dim=64, state_size=128, n_groups=8, expand=2, tie_word_embeddings=False
    )
    config = config.alias(mamba_n_heads="num_heads", mamba_d_head="head_dim", mamba_n_groups="n_groups")
    norm = NormSpec(eps=config.number("layer_norm_epsilon", 1e-5))
    return mixers_alone(config, read_mamba2(with_mamba_keys(config), norm))
