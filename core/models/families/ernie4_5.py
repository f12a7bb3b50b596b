"""ERNIE 4.5, dense: Llama with interleaved rope and one flag for all biases."""

from ..config import HFConfig
from ..llama_like import llama_like, turn_pairs, with_biases
from ..name_tables import LLAMA_NAMES
from ..spec import ModelSpec

WEIGHTS = LLAMA_NAMES


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama; the head is tied unless the config says otherwise."""
    config = config.with_defaults(
        num_key_value_heads=2, head_dim=128, max_position_embeddings=131072, hidden_act="silu", rope_theta=500000.0,
        tie_word_embeddings=True,
    )  # fmt: skip
    bias = config.boolean("use_bias", False)
    return turn_pairs(with_biases(llama_like(config, rms_norm_eps=1e-5), attention=bias, mlp=bias))
