"""VaultGemma: Gemma 2 without norms behind the blocks."""

from ..config import HFConfig
from ..llama_like import replace_layers
from ..name_tables import llama_names
from ..spec import ModelSpec
from . import gemma2

WEIGHTS = llama_names({"mlp_norm": "pre_feedforward_layernorm"})


def to_spec(config: HFConfig) -> ModelSpec:
    """Gemma 2."""
    return replace_layers(gemma2.to_spec(config), lambda layer: {"post_norm": False})
