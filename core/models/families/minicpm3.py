"""MiniCPM3: latent attention, and multipliers on embeddings, blocks and logits."""

import dataclasses

from ..config import HFConfig
from ..latent import LATENT, latent_like
from ..llama_like import replace_layers, replace_mlp
from ..name_tables import llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names(LATENT)


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama; rope turns halves."""
    config = config.with_defaults(
        max_position_embeddings=32768, hidden_act="silu", tie_word_embeddings=True, kv_lora_rank=256, q_lora_rank=768,
        qk_nope_head_dim=64, qk_rope_head_dim=32,
        v_head_dim=config.size("hidden_size") // config.size("num_attention_heads"),
    )  # fmt: skip
    spec = latent_like(config, rms_norm_eps=1e-5, in_pairs=False)
    residual_scale = config.number("scale_depth", 1.4) / spec.num_layers**0.5
    spec = replace_layers(spec, lambda layer: {"residual_scale": residual_scale})
    return dataclasses.replace(
        replace_mlp(spec, bias=config.boolean("mlp_bias", False)),
        embed_scale=config.number("scale_emb", 12.0),
        logit_scale=config.size("dim_model_base", 256) / spec.hidden_size,
    )
