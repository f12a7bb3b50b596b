"""What models with multi-head latent attention share (DeepSeek-V2): the spec read from a config, and names."""

import dataclasses
import math
from collections.abc import Mapping

from ..weights.names import Stored
from .config import HFConfig
from .llama_like import llama_like, replace_attention, turn_pairs
from .spec import LatentSpec, ModelSpec, NormSpec

LATENT: Mapping[str, str | Stored] = {
    "attn.q_a_proj": "self_attn.q_a_proj",
    "attn.q_a_norm": "self_attn.q_a_layernorm",
    "attn.q_b_proj": "self_attn.q_b_proj",
    "attn.kv_a_proj": "self_attn.kv_a_proj_with_mqa",
    "attn.kv_a_norm": "self_attn.kv_a_layernorm",
    "attn.kv_b_proj": "self_attn.kv_b_proj",
}
"""Names of what a latent adds to Llama's attention."""


def latent_like(config: HFConfig, *, rms_norm_eps: float = 1e-6, in_pairs: bool = True) -> ModelSpec:
    """Llama with latent attention. in_pairs: rope turns neighbours, unless `rope_interleave` says otherwise."""
    rope_dim, nope_dim = config.size("qk_rope_head_dim"), config.size("qk_nope_head_dim")
    num_heads, rank = config.size("num_attention_heads"), config.size("kv_lora_rank")
    config = config.replace(head_dim=rope_dim, num_key_value_heads=num_heads)
    spec = llama_like(config, rms_norm_eps=rms_norm_eps)
    scale, rope = (nope_dim + rope_dim) ** -0.5, spec.layers[0].attn.rope
    if rope is not None and rope.scaling is not None and rope.scaling.mscale_all_dim and rope.scaling.factor > 1:
        # DeepSeek's YaRN scales scores, where others scale cosines and sines.
        scale *= (0.1 * rope.scaling.mscale_all_dim * math.log(rope.scaling.factor) + 1) ** 2
    bias = config.boolean("attention_bias", False)
    latent = LatentSpec(
        q_lora_rank=config.integer("q_lora_rank", null=0),
        kv_lora_rank=rank,
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=config.size("v_head_dim"),
        norm=NormSpec(eps=1e-6),  # whatever the config says of other norms
        bias=bias,
    )
    spec = replace_attention(spec, num_kv_heads=1, head_dim=rank + rope_dim, scale=scale, latent=latent, o_bias=bias)
    spec = turn_pairs(spec) if config.boolean("rope_interleave", in_pairs) else spec
    return dataclasses.replace(spec, model_type=config.model_type)
