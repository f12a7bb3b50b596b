"""Vision-language models as data: how each model_type turns images into rows for the language model inside it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ModelError
from ..weights.names import NameTable, Stored
from .bert_like import read_head_dim
from .config import HFConfig
from .llama_like import read_activation, replace_attention, replace_mlp
from .spec import ModelSpec, NormSpec, VisionSpec
from .vision_like import (
    VIT_NAMES,
    Entries,
    grid_rope,
    image_token,
    projector,
    tower,
    turn_by_axes,
    vision_entries,
    vit,
    with_vision,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily:
    """read: the images' part of a config, given the language model's spec. entries: its names; renames: that turn
    what checkpoints have into these; unread: expressions of names that carry nothing we need. interleaves: the
    language model's rope turns by time, height and width, mixed (True) or one behind another (False). encoders: the
    kinds that are known, of families that have several; with others, the language model is served alone."""

    read: Callable[[HFConfig, ModelSpec], VisionSpec]
    entries: Entries
    renames: tuple[tuple[str, str], ...] = ()
    unread: tuple[str, ...] = ()
    interleaves: bool | None = None
    encoders: tuple[str, ...] = ()


def reads_images(config: HFConfig) -> bool:
    """True if the images of this model are known, not its language model alone."""
    family = VISION_FAMILIES.get(config.model_type)
    kind = config.mapping("vision_config").get("model_type", "")
    return family is not None and (not family.encoders or not kind or kind in family.encoders)


def add_images(config: HFConfig, spec: ModelSpec) -> ModelSpec:
    """The language model's spec with what reads images. Raises ModelError."""
    family = VISION_FAMILIES[config.model_type]
    if family.interleaves is not None:
        spec = turn_by_axes(config, spec, family.interleaves)
    try:
        return with_vision(spec, family.read(config, spec))
    except ModelError as error:
        alone = [] if config.model_type in SEES_AHEAD else ["HEADRACE_IMAGES=0, which loads the language model alone"]
        raise ModelError(error.reason, remedies=[*error.remedies, *alone]) from None


def vision_names(config: HFConfig, names: NameTable) -> NameTable:
    """The language model's table with the names of what reads images."""
    family = VISION_FAMILIES[config.model_type]
    return dataclasses.replace(
        names,
        entries={**names.entries, **family.entries},
        renames=(*family.renames, *names.renames),
        ignore=(*names.ignore, *family.unread),
    )


def _llava(config: HFConfig, spec: ModelSpec) -> VisionSpec:
    """Patches of CLIP's last layer but one, through two linear layers."""
    config = config.with_defaults(
        projector_hidden_act="gelu", vision_feature_layer=-2, vision_feature_select_strategy="default",
        multimodal_projector_bias=True, image_token_index=32000,
    )  # fmt: skip
    inner = HFConfig(config.mapping("vision_config"), file=f"vision_config of {config.file}").with_defaults(
        model_type="clip_vision_model", intermediate_size=4096, hidden_size=1024, patch_size=14, image_size=336,
        num_hidden_layers=24, num_attention_heads=16,
    )  # fmt: skip
    encoder, fields = tower(inner, num_layers=_feature_layer(config, inner.num_layers()), final_norm=False)
    if fields["has_class"] != (config.text("vision_feature_select_strategy") == "default"):
        raise ModelError(f"vision_feature_select_strategy in {config.file} does not fit its encoder of images")
    return VisionSpec(
        encoder=encoder,
        projector=projector(
            (encoder.hidden_size, spec.hidden_size, spec.hidden_size),
            ("linear_1", "linear_2"),
            read_activation(config, "projector_hidden_act"),
            bias=config.boolean("multimodal_projector_bias"),
        ),
        image_token_id=image_token(config),
        **fields,
    )


def _feature_layer(config: HFConfig, num_layers: int) -> int:
    """How many layers stand before the patches that are read; those of several layers side by side are an error."""
    value = config["vision_feature_layer"]
    chosen = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(chosen, int):
        raise ModelError(f"vision_feature_layer in {config.file} is {value!r}; one layer can be served")
    behind = chosen if chosen >= 0 else num_layers + 1 + chosen
    if not 0 < behind <= num_layers:
        raise ModelError(
            f"vision_feature_layer in {config.file} is {value!r}, but its encoder has {num_layers} layers"
        )
    return behind


def _paligemma(config: HFConfig, spec: ModelSpec) -> VisionSpec:
    """SigLIP's patches through one linear layer; image and prompt see each other."""
    encoder, fields = tower(_vision_config(config, "siglip_vision_model"))
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
    inner = _vision_config(config, "siglip_vision_model")
    encoder, fields = tower(inner)
    side = round(config.size("mm_tokens_per_image") ** 0.5)
    return VisionSpec(
        encoder=encoder,
        projector=projector(
            (encoder.hidden_size, spec.hidden_size),
            ("linear",),
            None,
            bias=False,
            is_mean=True,
            norm=NormSpec(eps=encoder.norm.eps, plus_one=True),
        ),
        image_token_id=image_token(config),
        merge=round(encoder.num_learned_positions**0.5) // side,
        sight="image",
        **fields,
    )


def _idefics3(config: HFConfig, spec: ModelSpec) -> VisionSpec:
    """Squares of SigLIP's patches side by side, through one linear layer."""
    config = config.with_defaults(scale_factor=2, image_token_id=128257)
    inner = _vision_config(config, "idefics3_vision").with_defaults(
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
    vision = _qwen(config, inner, spec, NormSpec())
    full = inner.indices("fullatt_block_indexes")
    encoder = replace_mlp(vision.encoder, gated=True)
    layers = tuple(
        dataclasses.replace(layer, attn=dataclasses.replace(layer.attn, in_window=i not in full))
        for i, layer in enumerate(encoder.layers)
    )
    return dataclasses.replace(
        vision, encoder=dataclasses.replace(encoder, layers=layers), window=inner.size("window_size")
    )


def _qwen3_vl(config: HFConfig, spec: ModelSpec) -> VisionSpec:
    """Position embeddings besides; what lower layers say is added behind the decoder's first layers."""
    inner = _qwen_config(
        config, hidden_size=1152, intermediate_size=4304, num_heads=16, depth=27, patch_size=16,
        hidden_act="gelu_pytorch_tanh", num_position_embeddings=2304, deepstack_visual_indexes=(8, 16, 24),
    )  # fmt: skip
    norm = NormSpec(kind="layer", bias=True)
    vision = _qwen(config, inner, spec, norm, ("linear_fc1", "linear_fc2"))
    tap = dataclasses.replace(vision.projector, patch_norm=None, norm=norm)
    return dataclasses.replace(
        vision,
        patch_bias=True,
        num_corners=inner.size("num_position_embeddings"),
        taps=tuple((layer, tap) for layer in inner.indices("deepstack_visual_indexes")),
    )


def _qwen_config(config: HFConfig, **defaults: Any) -> HFConfig:
    inner = _vision_config(config, config.model_type)
    inner = inner.alias(in_channels="in_chans") if "in_channels" not in inner else inner
    common = dict(
        depth=32, num_heads=16, in_channels=3, patch_size=14, spatial_merge_size=2, temporal_patch_size=2,
        hidden_act="silu",
    )  # fmt: skip
    inner = inner.with_defaults(**{**common, **defaults})
    return inner.alias(num_hidden_layers="depth", num_attention_heads="num_heads", num_channels="in_channels")


def _qwen(
    config: HFConfig, inner: HFConfig, spec: ModelSpec, norm: NormSpec, names: Sequence[str] = ("mlp.0", "mlp.2")
) -> VisionSpec:
    frames, size = inner.size("temporal_patch_size"), inner.size("patch_size")
    encoder = vit(inner, norm=norm, final_norm=False, num_features=inner.size("num_channels") * frames * size * size)
    encoder = replace_attention(encoder, rope=grid_rope(read_head_dim(inner)))
    merge, hidden = inner.size("spatial_merge_size"), encoder.hidden_size
    wide = hidden * merge**2
    return VisionSpec(
        encoder=encoder,
        projector=projector((wide, wide, spec.hidden_size), names, "gelu", patch_norm=norm),
        image_token_id=config.integer("image_token_id", 151655),
        patch_size=size,
        patch_bias=False,
        merge=merge,
        frames=frames,
    )


def _vision_config(config: HFConfig, model_type: str) -> HFConfig:
    inner = HFConfig(config.mapping("vision_config"), file=f"vision_config of {config.file}")
    return inner.with_defaults(model_type=model_type)


_TOWER = (r"^(?:model\.)?vision_tower\.(?:vision_model\.)?", "vision_tower.")
_PROJECTOR = (r"^(?:model\.)?multi_modal_projector\.", "multi_modal_projector.")
_CLASS: Entries = {"embed_class.weight": Stored(name="vision_tower.embeddings.class_embedding", reshape=True)}
_BUFFERS = (r"^vision_tower\.embeddings\.position_ids$", r"^vision_tower\.head\.")


def _vit_family(
    read: Callable[[HFConfig, ModelSpec], VisionSpec],
    projectors: Entries,
    *,
    renames: tuple[tuple[str, str], ...] = (_TOWER, _PROJECTOR),
    unread: tuple[str, ...] = (),
    encoders: tuple[str, ...] = (),
) -> VisionFamily:
    entries = vision_entries(
        VIT_NAMES, layer="vision_tower.encoder.layers.{i}.", tensors=_CLASS, projectors=projectors
    )
    return VisionFamily(read=read, entries=entries, renames=renames, unread=_BUFFERS + unread, encoders=encoders)


_IDEFICS3 = _vit_family(
    _idefics3,
    {"projector.proj": "connector.modality_projection.proj"},
    renames=((r"^(?:model\.)?vision_model\.", "vision_tower."), (r"^(?:model\.)?connector\.", "connector.")),
)
_QWEN_NAMES: Entries = {
    "embed_patches": Stored(name="visual.patch_embed.proj", reshape=True),
    "attn.qkv_proj": "attn.qkv",
    "attn.o_proj": "attn.proj",
    "attn_norm": "norm1",
    "mlp_norm": "norm2",
    **{f"mlp.{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}


def _qwen_family(
    read: Callable[[HFConfig, ModelSpec], VisionSpec],
    modules: Entries,
    projectors: Entries,
    *,
    interleaves: bool = False,
) -> VisionFamily:
    entries = vision_entries({**_QWEN_NAMES, **modules}, layer="visual.blocks.{i}.", projectors=projectors)
    return VisionFamily(
        read=read, entries=entries, renames=((r"^(?:model\.)?visual\.", "visual."),), interleaves=interleaves
    )


_QWEN_MERGER: Entries = {
    "projector.patch_norm": "visual.merger.ln_q",
    **{f"projector.mlp.{n}": f"visual.merger.mlp.{n}" for n in (0, 2)},
}
VISION_FAMILIES: Mapping[str, VisionFamily] = {
    "llava": _vit_family(
        _llava,
        {f"projector.linear_{n}": f"multi_modal_projector.linear_{n}" for n in (1, 2)},
        # The layers behind the one that is read.
        unread=(r"^vision_tower\.encoder\.layers\.\d+\.", r"^vision_tower\.post_layernorm\."),
        encoders=("clip_vision_model", "siglip_vision_model"),
    ),
    "paligemma": _vit_family(_paligemma, {"projector.linear": "multi_modal_projector.linear"}),
    "gemma3": _vit_family(
        _gemma3,
        {
            "projector.linear": Stored(name="multi_modal_projector.mm_input_projection_weight", transpose=True),
            "projector.norm": "multi_modal_projector.mm_soft_emb_norm",
        },
    ),
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3,
    "qwen2_vl": _qwen_family(_qwen2_vl, {"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}, _QWEN_MERGER),
    "qwen2_5_vl": _qwen_family(_qwen2_5_vl, {}, _QWEN_MERGER),
    "qwen3_vl": _qwen_family(
        _qwen3_vl,
        {
            "embed_corners": "visual.pos_embed",
            "mlp.up_proj": "mlp.linear_fc1",
            "mlp.down_proj": "mlp.linear_fc2",
        },
        {
            "projector.patch_norm": "visual.merger.norm",
            "taps.{i}.norm": "visual.deepstack_merger_list.{i}.norm",
            **{f"projector.linear_fc{n}": f"visual.merger.linear_fc{n}" for n in (1, 2)},
            **{f"taps.{{i}}.linear_fc{n}": f"visual.deepstack_merger_list.{{i}}.linear_fc{n}" for n in (1, 2)},
        },
        interleaves=True,
    ),
}
SEES_AHEAD = frozenset({"paligemma"})
"""Types whose prompts see ahead, with images or without."""
