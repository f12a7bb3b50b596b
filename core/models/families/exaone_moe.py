"""K-EXAONE: EXAONE 4 with norms before the blocks, and DeepSeek-V3's experts after the first dense layer."""

from ...weights.names import Stored
from ..config import HFConfig
from ..llama_like import replace_layers
from ..mixtures import read_deepseek_experts, replace_with_experts, sparse_after
from ..name_tables import EXPERTS, SHARED_EXPERTS, llama_names
from ..spec import ModelSpec
from . import exaone4

_CORRECTION = "mlp.{}e_score_correction_bias"
WEIGHTS = llama_names(
    {**EXPERTS, **SHARED_EXPERTS},
    tensors={"mlp.router.correction": Stored(name=_CORRECTION.format(""), also=(_CORRECTION.format("gate."),))},
    ignore=(r"^mtp\.",),
)


def to_spec(config: HFConfig) -> ModelSpec:
    """The layer that predicts a second token is left out."""
    config = config.with_defaults(
        hidden_act="silu", moe_intermediate_size=1024, num_experts=64, num_experts_per_tok=8, num_shared_experts=1,
        routed_scaling_factor=2.5, num_key_value_heads=32,
    ).alias(n_shared_experts="num_shared_experts")  # fmt: skip
    spec = replace_layers(exaone4.to_spec(config), lambda layer: {"pre_norm": True, "post_norm": False})
    return replace_with_experts(spec, read_deepseek_experts(config), sparse_after(config, "first_k_dense_replace", 1))
