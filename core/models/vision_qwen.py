"""Vision-language models of Qwen's kind as data: images of any size, ropes by row and column, M-RoPE behind them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..weights.names import Stored
from .config import NOTHING, HFConfig, flag
from .llama_like import ByLayer, read_activation
from .spec import DenseSpec, ModelSpec, NormSpec
from .vision_like import Entries, VisionFamily, grid_rope, projector, vision_config, vision_entries, vit
from .vision_spec import ProjectorSpec, VisionSpec

_IMAGE_TOKENS = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), 248056),
    "glm4v": 151343,
    "glm4v_moe": 151363,
    "glm46v": 151343,
    "glm_ocr": 59280,
}


def _qwen2_vl(config: HFConfig, spec: ModelSpec) -> VisionSpec:
    """Patches of images of any size, turned by row and column; squares of them through two linear layers."""
    inner = _qwen_config(config, embed_dim=1280, hidden_size=3584, mlp_ratio=4, hidden_act="quick_gelu")
    hidden = inner.size("embed_dim")
    inner = inner.replace(hidden_size=hidden, intermediate_size=int(hidden * inner.number("mlp_ratio")))
    return _qwen(config, inner, spec, NormSpec(kind="layer", bias=True))


def _qwen2_5_vl(config: HFConfig, spec: ModelSpec) -> VisionSpec:
    """Most layers see windows."""
    inner = _qwen_config(
        config, hidden_size=3584, intermediate_size=3420, window_size=112, fullatt_block_indexes=(7, 15, 23, 31)
    )
    full = inner.indices("fullatt_block_indexes")
    attn = {"in_window": ByLayer(i not in full for i in range(inner.num_layers()))}
    encoder = {"mlp": {"gated": True}}
    return _qwen(config, inner, spec, NormSpec(), attn=attn, encoder=encoder, window=inner.size("window_size"))


def _qwen3_vl(config: HFConfig, spec: ModelSpec) -> VisionSpec:
    """Position embeddings besides; what lower layers say is added behind the decoder's first layers."""
    taps = () if config.model_type.startswith("qwen3_5") else (8, 16, 24)
    inner = _qwen_config(
        config, hidden_size=1152, intermediate_size=4304, num_heads=16, depth=27, patch_size=16,
        hidden_act="gelu_pytorch_tanh", num_position_embeddings=2304, deepstack_visual_indexes=taps,
    )  # fmt: skip
    norm, names = NormSpec(kind="layer", bias=True), ("linear_fc1", "linear_fc2")
    corners = inner.size("num_position_embeddings")
    vision = _qwen(config, inner, spec, norm, names, patch_bias=True, num_corners=corners)
    tap = dataclasses.replace(vision.projector, patch_norm=None, norm=norm)
    return dataclasses.replace(vision, taps=tuple((n, tap) for n in inner.indices("deepstack_visual_indexes")))


def _glm4v(config: HFConfig, spec: ModelSpec) -> VisionSpec:
    """Positions by bicubic interpolation; squares through a convolution, a linear layer and a gated block."""
    inner = _qwen_config(
        config, depth=24, hidden_size=1536, intermediate_size=13696, num_heads=12, image_size=336,
        rms_norm_eps=1e-5, out_hidden_size=4096,
    )  # fmt: skip
    norm, wide, out = NormSpec(eps=inner.number("rms_norm_eps")), inner.size("intermediate_size"), spec.hidden_size
    inner = inner.replace(intermediate_size=inner.size("out_hidden_size"))
    square = inner.size("hidden_size") * inner.size("spatial_merge_size") ** 2
    dense = (
        DenseSpec(name="downsample", in_features=square, out_features=out),
        DenseSpec(
            name="proj", in_features=out, out_features=out, bias=False, activation="gelu", norm_first=True,
            norm=NormSpec(kind="layer", eps=1e-5, bias=True),
        ),
        DenseSpec(
            name="mlp", in_features=out, out_features=wide, bias=False, gated=True,
            activation=read_activation(inner, "hidden_act"),
        ),
        DenseSpec(name="down_proj", in_features=wide, out_features=out, bias=False),
    )  # fmt: skip
    encoder = dict(attn_bias=False, qkv_bias=flag("attention_bias"), mlp_bias=False, mlp={"gated": True})
    return _qwen(
        config,
        inner,
        spec,
        norm,
        encoder={**encoder, "final_norm": True},
        projector=ProjectorSpec(dense=dense),
        patch_bias=True,
        patch_norm=norm,
        num_corners=(inner.size("image_size") // inner.size("patch_size")) ** 2,
        is_bicubic=True,
    )


def _qwen_config(config: HFConfig, **defaults: Any) -> HFConfig:
    inner = vision_config(config, config.model_type)
    inner = inner.alias(in_channels="in_chans") if "in_channels" not in inner else inner
    common = dict(
        depth=32, num_heads=16, in_channels=3, patch_size=14, spatial_merge_size=2, temporal_patch_size=2,
        hidden_act="silu",
    )  # fmt: skip
    inner = inner.with_defaults(**{**common, **defaults})
    return inner.alias(num_hidden_layers="depth", num_attention_heads="num_heads", num_channels="in_channels")


def _qwen(
    config: HFConfig,
    inner: HFConfig,
    spec: ModelSpec,
    norm: NormSpec,
    names: Sequence[str] = ("mlp.0", "mlp.2"),
    *,
    attn: Mapping[str, Any] = NOTHING,
    encoder: Mapping[str, Any] = NOTHING,
    **fields: Any,
) -> VisionSpec:
    """names: of the projector's layers. attn, encoder: options of the encoder; fields: others of the whole."""
    frames, size, merge = (inner.size(f"{key}_size") for key in ("temporal_patch", "patch", "spatial_merge"))
    patch, wide = inner.size("num_channels") * frames * size * size, inner.size("hidden_size") * merge**2
    common = {"norm": norm, "final_norm": False, "attn": {"rope": grid_rope(inner), **attn}, "num_features": patch}
    vision: dict[str, Any] = dict(
        encoder=vit(inner, **{**common, **encoder}),
        projector=projector((wide, wide, spec.hidden_size), names, "gelu", patch_norm=norm),
        image_token_id=config.integer("image_token_id", _IMAGE_TOKENS.get(config.model_type, 151655)),
        patch_size=size,
        patch_bias=False,
        merge=merge,
        frames=frames,
    )
    return VisionSpec(**{**vision, **fields})


def _qwen_family(
    read: Callable[[HFConfig, ModelSpec], VisionSpec], modules: Entries, *, interleaves: bool = False
) -> VisionFamily:
    common: Entries = {
        "embed_patches": Stored(name="visual.patch_embed.proj", reshape=True), "attn.qkv_proj": "attn.qkv",
        "attn.o_proj": "attn.proj", "attn_norm": "norm1", "mlp_norm": "norm2",
        **{f"mlp.{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    }  # fmt: skip
    entries = vision_entries({**common, **modules}, layer="visual.blocks.{i}.")
    return VisionFamily(read=read, entries=entries, interleaves=interleaves)


_QWEN_MERGER: Entries = {
    "projector.patch_norm": "visual.merger.ln_q",
    **{f"projector.mlp.{n}": f"visual.merger.mlp.{n}" for n in (0, 2)},
}
_QWEN3_VL = _qwen_family(
    _qwen3_vl,
    {
        "embed_corners": "visual.pos_embed", "mlp.up_proj": "mlp.linear_fc1", "mlp.down_proj": "mlp.linear_fc2",
        "projector.patch_norm": "visual.merger.norm", "taps.{i}.norm": "visual.deepstack_merger_list.{i}.norm",
        **{f"projector.linear_fc{n}": f"visual.merger.linear_fc{n}" for n in (1, 2)},
        **{f"taps.{{i}}.linear_fc{n}": f"visual.deepstack_merger_list.{{i}}.linear_fc{n}" for n in (1, 2)},
    },
    interleaves=True,
)  # fmt: skip
_GLM4V = _qwen_family(
    _glm4v,
    {
        "embed_corners": "visual.embeddings.position_embedding", "final_norm": "visual.post_layernorm",
        "patch_norm": "visual.post_conv_layernorm",
        "projector.downsample": Stored(name="visual.downsample", kernel=4),
        "projector.proj": "visual.merger.proj", "projector.proj_norm": "visual.merger.post_projection_norm",
        **{f"projector.mlp.{name}_proj": f"visual.merger.{name}_proj" for name in ("gate", "up")},
        "projector.down_proj": "visual.merger.down_proj",
    },
)  # fmt: skip
QWEN_FAMILIES: Mapping[str, VisionFamily] = {
    **dict.fromkeys(("glm4v", "glm46v", "glm4v_moe"), _GLM4V),
    "qwen2_vl": _qwen_family(_qwen2_vl, {"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2", **_QWEN_MERGER}),
    "qwen2_5_vl": _qwen_family(_qwen2_5_vl, _QWEN_MERGER),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"), _QWEN3_VL),
}
