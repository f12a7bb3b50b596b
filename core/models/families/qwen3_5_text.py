"""Qwen3.5, text only: Qwen3-Next with dense feed-forward blocks and projections stored one by one."""

import dataclasses

from ..config import HFConfig
from ..hybrids import mixer_modules, mixer_tensors
from ..name_tables import EXPERTS, SHARED_EXPERT, llama_names
from ..spec import ModelSpec
from .qwen3_next import AT, qwen3_next_like

WEIGHTS = dataclasses.replace(
    llama_names(
        {
            **EXPERTS,
            **SHARED_EXPERT,
            **mixer_modules(
                AT, qkv_proj="in_proj_qkv", z_proj="in_proj_z", beta_proj="in_proj_b", dt_proj="in_proj_a"
            ),
        },
        tensors=mixer_tensors(AT),
        ignore=(r"^mtp\.",),
    ),
    renames=((r"^model\.language_model\.", "model."),),
)


def to_spec(config: HFConfig) -> ModelSpec:
    """The layers of Qwen3-Next."""
    return qwen3_next_like(config.with_defaults(intermediate_size=12288, num_key_value_heads=4))
