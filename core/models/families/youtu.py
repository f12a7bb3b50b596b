"""Youtu-LLM: latent attention in a dense model."""

from ..config import HFConfig
from ..latent import LATENT, latent_like
from ..name_tables import llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names(LATENT)


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama with latents."""
    config = config.with_defaults(
        max_position_embeddings=131072, hidden_act="silu", tie_word_embeddings=True, kv_lora_rank=512,
        q_lora_rank=1536, qk_rope_head_dim=64, v_head_dim=128, qk_nope_head_dim=128,
    )  # fmt: skip
    return latent_like(config)
