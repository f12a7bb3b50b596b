"""Vision-language models of tiles and images of one size as data: encoders like CLIP's, SigLIP's and Pixtral's."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..errors import ModelError
from ..weights.names import Stored
from .config import HFConfig, flag
from .llama_like import layer_norm
from .name_tables import glu
from .spec import DenseSpec, ModelSpec, NormSpec
from .vision_like import (
    VIT_NAMES,
    Entries,
    VisionFamily,
    grid_rope,
    image_token,
    projector,
    tower,
    two_linears,
    vision_config,
    vision_entries,
    vit,
)
from .vision_spec import ProjectorSpec, VisionSpec
from .wrappers import text_config


def _llava(config: HFConfig, spec: ModelSpec) -> VisionSpec:
    """Patches of CLIP's last layer but one, or of several layers, through two linear layers."""
    is_newest, is_vip = config.model_type == "llava_onevision", config.model_type == "vipllava"
    tokens, layers = {"llava_onevision": 151646, "llava_next_video": 32001}, [-2, -5, -8, -11, 6] if is_vip else -2
    config = config.with_defaults(
        vision_feature_layer=-1 if is_newest else layers, image_token_index=tokens.get(config.model_type, 32000),
        vision_feature_select_strategy="full" if is_newest else "default",
    )  # fmt: skip
    inner = vision_config(config, "siglip_vision_model" if is_newest else "clip_vision_model").with_defaults(
        intermediate_size=4096, hidden_size=1024, patch_size=14, image_size=336, num_hidden_layers=24,
        num_attention_heads=16,
    )  # fmt: skip
    read = _feature_layers(config, inner.num_layers())
    encoder, fields = tower(inner, num_layers=max(read), final_norm=False)
    strategy = config.text("vision_feature_select_strategy")
    extra_rows = fields.get("has_class", False) - (strategy == "default")
    may_differ = config.model_type == "llava" and encoder.num_learned_positions > 0
    if strategy not in ("default", "full") or (extra_rows and not may_differ):
        raise ModelError(f"vision_feature_select_strategy in {config.file} is {strategy!r}, which is not served")
    bias = config.boolean("multimodal_projector_bias", True)
    eps, chosen = config.number("projector_layernorm_eps", 1e-5), tuple(n - 1 for n in read) if len(read) > 1 else ()
    norm = NormSpec(kind="layer", eps=eps, bias=True) if is_vip else None
    dense = two_linears(config, encoder.hidden_size * len(read), spec, bias=bias, norm=norm)
    fields |= {"chosen": chosen, "extra_rows": extra_rows}
    return VisionSpec(encoder=encoder, projector=dense, image_token_id=image_token(config), **fields)


def _llava_next(config: HFConfig, spec: ModelSpec) -> VisionSpec:
    """The whole picture and its tiles, put together line by line."""
    vision = _llava(config, spec)
    points = config.get("image_grid_pinpoints") or (_PINPOINTS if config.model_type != "llava_onevision" else None)
    if points is None:
        points = [[384 * i, 384 * j] for i in range(1, 7) for j in range(1, 7)]
    try:
        resolutions = tuple((int(height), int(width)) for height, width in points)
    except (TypeError, ValueError):
        raise ModelError(f"image_grid_pinpoints in {config.file} is no list of heights and widths") from None
    kind = config.text("vision_aspect_ratio", "anyres_max_9") if config.model_type == "llava_onevision" else "anyres"
    limit = kind.removeprefix("anyres_max_")
    if kind != "anyres" and not limit.isdecimal():
        raise ModelError(f"vision_aspect_ratio in {config.file} is {kind!r}; anyres_max_9 and its like can be served")
    return dataclasses.replace(
        vision, has_newline=True, resolutions=resolutions, max_tiles=0 if kind == "anyres" else int(limit)
    )


def _mistral3(config: HFConfig, spec: ModelSpec) -> VisionSpec:
    """Squares of Pixtral's patches, normalised and merged by a linear layer, through two more."""
    config = config.with_defaults(vision_feature_layer=-1, image_token_index=10, spatial_merge_size=2)
    encoder, fields = tower(vision_config(config, "pixtral"))
    depth = encoder.num_layers
    if _feature_layers(config, depth) != [depth]:
        raise ModelError(f"vision_feature_layer in {config.file} is not the last one, which alone can be served")
    merge, hidden = config.size("spatial_merge_size"), encoder.hidden_size
    merging = DenseSpec(name="merging", in_features=hidden * merge**2, out_features=hidden, bias=False)
    norm = NormSpec(eps=text_config(config).number("rms_norm_eps", spec.norm.eps))
    bias = config.boolean("multimodal_projector_bias", False)
    rest = two_linears(config, hidden, spec, bias=bias, patch_norm=norm)
    return VisionSpec(
        encoder=encoder,
        projector=dataclasses.replace(rest, dense=(merging, *rest.dense)),
        image_token_id=image_token(config),
        merge=merge,
        **fields,
    )


def _feature_layers(config: HFConfig, num_layers: int) -> list[int]:
    """How many layers stand before the patches that are read; those of several layers stand side by side."""
    value = config["vision_feature_layer"]
    chosen = value if isinstance(value, list) else [value]
    if not chosen or any(type(n) is not int for n in chosen):
        raise ModelError(f"vision_feature_layer in {config.file} must be a layer or a list of layers, got {value!r}")
    behind = [n if n >= 0 else num_layers + 1 + n for n in chosen]
    if not all(0 < n <= num_layers for n in behind):
        raise ModelError(
            f"vision_feature_layer in {config.file} is {value!r}, but its encoder has {num_layers} layers"
        )
    return behind


def _deepseek_vl(config: HFConfig, spec: ModelSpec) -> VisionSpec:
    """SigLIP's patches through two linear layers."""
    config = config.with_defaults(image_token_id=100015)
    encoder, fields = tower(vision_config(config, "siglip_vision_model"))
    sizes = (encoder.hidden_size, spec.hidden_size, spec.hidden_size)
    dense = projector(sizes, ("linear1", "linear2"), "gelu")
    return VisionSpec(encoder=encoder, projector=dense, image_token_id=image_token(config), **fields)


def _paligemma(config: HFConfig, spec: ModelSpec) -> VisionSpec:
    """SigLIP's patches through one linear layer; image and prompt see each other."""
    encoder, fields = tower(vision_config(config, "siglip_vision_model"))
    return VisionSpec(
        encoder=encoder,
        projector=projector((encoder.hidden_size, spec.hidden_size), ("linear",), None),
        image_token_id=image_token(config),
        sight="prompt",
        **fields,
    )


def _gemma3(config: HFConfig, spec: ModelSpec) -> VisionSpec:
    """Means of squares of SigLIP's patches; the rows of an image see each other."""
    config = config.with_defaults(mm_tokens_per_image=256, image_token_index=262144)
    encoder, fields = tower(vision_config(config, "siglip_vision_model"))
    side, norm = round(config.size("mm_tokens_per_image") ** 0.5), NormSpec(eps=encoder.norm.eps, plus_one=True)
    sizes = (encoder.hidden_size, spec.hidden_size)
    return VisionSpec(
        encoder=encoder,
        projector=projector(sizes, ("linear",), None, bias=False, is_mean=True, norm=norm),
        image_token_id=image_token(config),
        merge=round(encoder.num_learned_positions**0.5) // side,
        sight="image",
        **fields,
    )


def _idefics3(config: HFConfig, spec: ModelSpec) -> VisionSpec:
    """Squares of SigLIP's patches side by side, through one linear layer."""
    config = config.with_defaults(scale_factor=2, image_token_id=128257)
    inner = vision_config(config, "idefics3_vision").with_defaults(
        hidden_size=1152, num_attention_heads=16, patch_size=32
    )
    encoder, fields = tower(inner)
    merge = config.size("scale_factor")
    return VisionSpec(
        encoder=encoder,
        projector=projector((encoder.hidden_size * merge**2, spec.hidden_size), ("proj",), None, bias=False),
        image_token_id=image_token(config),
        merge=merge,
        **fields,
    )


def _internvl(config: HFConfig, spec: ModelSpec) -> VisionSpec:
    """Squares of patches of tiles, normalised, through two linear layers."""
    config = config.with_defaults(
        image_token_id=151667, downsample_ratio=0.5, vision_feature_layer=-1, vision_feature_select_strategy="default"
    )
    inner = vision_config(config, "internvl_vision").with_defaults(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, hidden_act="gelu",
        layer_norm_eps=1e-6, image_size=448, patch_size=14, num_channels=3, norm_type="layer_norm",
    )  # fmt: skip
    inner = inner.replace(image_size=_side(inner, "image_size"), patch_size=_side(inner, "patch_size"))
    if config["vision_feature_layer"] != -1 or config.text("vision_feature_select_strategy") != "default":
        raise ModelError(f"{config.file} does not read the patches of the last layer, which alone can be served")
    if not inner.boolean("use_absolute_position_embeddings", True):
        raise ModelError(f"{inner.file} has no learned positions; those without are not served")
    eps, size, is_rms = (
        inner.number("layer_norm_eps"),
        inner.size("patch_size"),
        inner.text("norm_type") == "rms_norm",
    )
    has_norm = not inner.boolean("use_mean_pooling", True)
    if is_rms and has_norm:
        raise ModelError(f"{inner.file} has a layer norm behind RMS norms, which is not served")
    encoder = vit(
        inner,
        norm=NormSpec(eps=eps) if is_rms else layer_norm,
        qkv_bias=flag("attention_bias"),
        attn_bias=False,
        attn={
            "qk_norm": NormSpec() if inner.boolean("use_qk_norm", False) else None,
            "qk_norm_over": "all",
            "o_bias": True,
        },
        num_learned_positions=(inner.size("image_size") // size) ** 2 + 1,
        final_norm=has_norm,
    )
    merge, norm = round(1 / config.positive("downsample_ratio")), NormSpec(kind="layer", eps=1e-5, bias=True)
    return VisionSpec(
        encoder=encoder,
        projector=two_linears(config, encoder.hidden_size * merge**2, spec, norm=norm),
        image_token_id=image_token(config),
        patch_size=size,
        merge=merge,
        has_class=True,
    )


def _cohere(config: HFConfig, spec: ModelSpec) -> VisionSpec:
    """Squares of SigLIP's patches of tiles, through a gated layer and one more."""
    is_aya = config.model_type == "aya_vision"
    config = config.with_defaults(
        downsample_factor=2, alignment_intermediate_size=spec.hidden_size if is_aya else 36864,
        image_token_index=255036, adapter_layer_norm_eps=1e-6,
    )  # fmt: skip
    if is_aya and (config.get("vision_feature_layer", -1) != -1):
        raise ModelError(f"vision_feature_layer in {config.file} is not the last one, which alone can be served")
    encoder, fields = tower(vision_config(config, "siglip_vision_model"), final_norm=not is_aya)
    merge, wide = config.size("downsample_factor"), config.size("alignment_intermediate_size") // 2
    dense = (
        DenseSpec(
            name="linear_1", in_features=encoder.hidden_size * merge**2, out_features=wide, gated=True,
            activation="silu",
        ),
        DenseSpec(name="linear_2", in_features=wide, out_features=spec.hidden_size),
    )  # fmt: skip
    norm = NormSpec(kind="layer", eps=config.number("adapter_layer_norm_eps"), bias=True) if is_aya else None
    return VisionSpec(
        encoder=encoder,
        projector=ProjectorSpec(dense=dense, norm=norm),
        image_token_id=image_token(config),
        merge=merge,
        **fields,
    )


def _llama4(config: HFConfig, spec: ModelSpec) -> VisionSpec:
    """Squares of patches of tiles, turned by column and row, through three linear layers."""
    config = config.with_defaults(image_token_index=200092)
    inner = vision_config(config, "llama4_vision_model").with_defaults(
        hidden_size=768, num_hidden_layers=34, num_attention_heads=16, num_channels=3, intermediate_size=5632,
        image_size=448, patch_size=14, pixel_shuffle_ratio=0.5, projector_input_dim=4096,
        projector_output_dim=4096, vision_output_dim=7680,
    )  # fmt: skip
    inner = inner.replace(hidden_act="gelu", layer_norm_eps=1e-5)
    size, theta = inner.size("patch_size"), inner.rope_parameters().number("rope_theta", 10000.0)
    rope, side = grid_rope(inner, columns_first=True, theta=theta, interleaved=True), inner.size("image_size") // size
    encoder = vit(inner, attn={"rope": rope}, num_learned_positions=side**2 + 1, embed_norm=True)
    wide, out = inner.size("projector_input_dim"), inner.size("projector_output_dim")
    merge = round(1 / inner.positive("pixel_shuffle_ratio"))
    dense = (
        DenseSpec(
            name="fc1", in_features=encoder.hidden_size * merge**2, out_features=wide, bias=False, activation="gelu"
        ),
        DenseSpec(name="fc2", in_features=wide, out_features=out, bias=False, activation="gelu"),
        DenseSpec(name="linear_1", in_features=out, out_features=spec.hidden_size, bias=False),
    )
    return VisionSpec(
        encoder=encoder,
        projector=ProjectorSpec(dense=dense),
        image_token_id=image_token(config),
        patch_size=size,
        merge=merge,
        patch_bias=False,
        has_class=True,
        class_last=True,
        first_place=1,
    )


def _side(config: HFConfig, key: str) -> int:
    """One number, or a pair of equal ones."""
    value = config[key]
    if isinstance(value, list | tuple) and len(set(value)) == 1:
        config = config.replace(**{key: value[0]})
    return config.size(key)


_CLASS: Entries = {"embed_class.weight": Stored(name="vision_tower.embeddings.class_embedding", reshape=True)}
_BEHIND = (r"^vision_tower\.encoder\.layers\.\d+\.", r"^vision_tower\.post_layernorm\.")
"""Layers behind the one that is read."""
_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
_AT = "multi_modal_projector."
_LINEARS: Entries = {f"projector.linear_{n}": f"{_AT}linear_{n}" for n in (1, 2)}


def _family(
    read: Callable[[HFConfig, ModelSpec], VisionSpec],
    projectors: Entries,
    *,
    modules: Entries = VIT_NAMES,
    layer: str = "vision_tower.encoder.layers.{i}.",
    tensors: Entries = _CLASS,
    **fields: Any,
) -> VisionFamily:
    """projectors, modules, tensors: names; see `name_table`. fields: others of the family."""
    entries = vision_entries({**modules, **projectors}, layer=layer, tensors=tensors)
    return VisionFamily(read=read, entries=entries, **fields)


_pixtral_family = partial(
    _family,
    modules={
        "embed_patches": Stored(name="vision_tower.patch_conv", reshape=True), "embed_norm": "vision_tower.ln_pre",
        "attn_norm": "attention_norm", "mlp_norm": "ffn_norm", **glu("mlp", "feed_forward"),
        **{f"attn.{name}_proj": f"attention.{name}_proj" for name in "qkvo"},
    },
    layer="vision_tower.transformer.layers.{i}.",
)  # fmt: skip
_IDEFICS3 = _family(_idefics3, {"projector.proj": "connector.modality_projection.proj"})
_LLAVA_NEXT = _family(
    _llava_next,
    _LINEARS,
    tensors={**_CLASS, "projector.newline.weight": Stored(name="image_newline", reshape=True)},
    unread=_BEHIND,
    encoders=("clip_vision_model", "siglip_vision_model"),
)
_COHERE = _family(
    _cohere,
    {
        "projector.norm": f"{_AT}layernorm", "projector.linear_2": f"{_AT}linear_2",
        # Stored with the gate behind.
        "projector.linear_1.gate_up_proj": Stored(name=f"{_AT}linear_1", interleaved=True, groups=1, order=(1, 0)),
    },
    unread=_BEHIND,
)  # fmt: skip
_INTERNVL = _family(
    _internvl,
    {"projector.norm": f"{_AT}layer_norm", **_LINEARS},
    modules={
        "embed_patches": Stored(name="vision_tower.embeddings.patch_embeddings.projection", reshape=True),
        "final_norm": "vision_tower.layernorm", "attn_norm": "layernorm_before", "mlp_norm": "layernorm_after",
        **{f"attn.{name}": f"attention.{name}" for name in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")},
        "attn.o_proj": Stored(name="attention.projection_layer", scaled_by="lambda_1"), "mlp.up_proj": "mlp.fc1",
        "mlp.down_proj": Stored(name="mlp.fc2", scaled_by="lambda_2"),
    },
    layer="vision_tower.encoder.layer.{i}.",
    tensors={
        "embed_class.weight": Stored(name="vision_tower.embeddings.cls_token", reshape=True),
        "embed_positions.weight": Stored(name="vision_tower.embeddings.position_embeddings", reshape=True),
    },
    unread=(r"^vision_tower\.embeddings\.mask_token$", r"^vision_tower\.layernorm\."),
)  # fmt: skip
_LLAMA4 = _family(
    _llama4,
    {
        **{f"projector.fc{n}": f"vision_tower.vision_adapter.mlp.fc{n}" for n in (1, 2)},
        "projector.linear_1": f"{_AT}linear_1",
    },
    modules={
        **VIT_NAMES, "embed_patches": "vision_tower.patch_embedding.linear", "attn_norm": "input_layernorm",
        "embed_norm": "vision_tower.layernorm_pre", "final_norm": "vision_tower.layernorm_post",
        "attn.o_proj": "self_attn.o_proj", "mlp_norm": "post_attention_layernorm",
    },
    layer="vision_tower.model.layers.{i}.",
    tensors={
        "embed_class.weight": Stored(name="vision_tower.class_embedding", reshape=True),
        "embed_positions.weight": "vision_tower.positional_embedding_vlm",
    },
    unread=(r"^vision_tower\.rotary_embedding\.",),
)  # fmt: skip
VIT_FAMILIES: Mapping[str, VisionFamily] = {
    "aya_vision": _COHERE,
    "cohere2_vision": _COHERE,
    "deepseek_vl": _family(_deepseek_vl, {f"projector.linear{n}": f"aligner.linear{n}" for n in (1, 2)}),
    "gemma3": _family(
        _gemma3,
        {"projector.norm": f"{_AT}mm_soft_emb_norm"},
        tensors={"projector.linear.weight": Stored(name=f"{_AT}mm_input_projection_weight", transpose=True)},
    ),
    "idefics3": _IDEFICS3,
    "internvl": _INTERNVL,
    "llama4": _LLAMA4,
    "llava": _family(
        _llava, _LINEARS, unread=_BEHIND, encoders=("clip_vision_model", "siglip_vision_model", "pixtral")
    ),
    "llava/pixtral": _pixtral_family(_llava, _LINEARS),
    "llava_next": _LLAVA_NEXT,
    "llava_next_video": _LLAVA_NEXT,
    "llava_onevision": _LLAVA_NEXT,
    "mistral3": _pixtral_family(
        _mistral3,
        {
            "projector.patch_norm": f"{_AT}norm",
            "projector.merging": Stored(name=f"{_AT}patch_merger.merging_layer", kernel=4),
            **_LINEARS,
        },
    ),
    "paligemma": _family(_paligemma, {"projector.linear": f"{_AT}linear"}),
    "smolvlm": _IDEFICS3,
    "vipllava": _family(
        _llava,
        {"projector.norm": f"{_AT}projector_layernorm", **_LINEARS},
        unread=_BEHIND,
        encoders=("clip_vision_model",),
    ),
}
"""By model_type, and "/" with the kind of its encoder where that has other names."""
