"""What models with multi-head latent attention share (DeepSeek-V2): the spec read from a config."""

import math
from typing import Any

from .config import HFConfig, Read, flag, read
from .llama_like import llama_like, replace_attention
from .spec import LatentSpec, ModelSpec, NormSpec

_PAIRS = flag("rope_interleave", True)


def latent_like(
    config: HFConfig, *, rms_norm_eps: float = 1e-6, pairs: Read[bool] = _PAIRS, **options: Any
) -> ModelSpec:
    """Llama with latent attention. pairs: rope turns neighbours; options: as `llama_like` takes them."""
    rope_dim, nope_dim = config.size("qk_rope_head_dim"), config.size("qk_nope_head_dim")
    num_heads, rank = config.size("num_attention_heads"), config.size("kv_lora_rank")
    config = config.replace(head_dim=rope_dim, num_key_value_heads=num_heads)
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
    attn: dict[str, Any] = {
        "num_kv_heads": 1,
        "head_dim": rank + rope_dim,
        "scale": (nope_dim + rope_dim) ** -0.5,
        "latent": latent,
    }
    attn |= {"o_bias": bias, **options.pop("attn", {})}
    spec = llama_like(config, rms_norm_eps=rms_norm_eps, attn=attn, in_pairs=read(pairs, config), **options)
    rope = spec.layers[0].attn.rope
    if rope is not None and rope.scaling is not None and rope.scaling.mscale_all_dim and rope.scaling.factor > 1:
        # DeepSeek's YaRN scales scores, where others scale cosines and sines.
        factor = (0.1 * rope.scaling.mscale_all_dim * math.log(rope.scaling.factor) + 1) ** 2
        spec = replace_attention(spec, scale=spec.layers[0].attn.scale * factor)
    return spec
