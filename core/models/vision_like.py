"""Encoders of images as data: what CLIP, SigLIP and Qwen's share, config keys and names of weights alike."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ModelError
from ..weights.names import Stored
from .config import NOTHING, HFConfig
from .llama_like import gpt_like, read_activation, replace_layers
from .name_tables import PROJECTORS, name_table
from .spec import Activation, DenseSpec, LayerSpec, ModelSpec, NormSpec, RopeSpec
from .vision_spec import ProjectorSpec, VisionSpec
from .wrappers import text_config

Entries = Mapping[str, str | Stored]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily:
    """read: the images' part of a config, given the language model's spec. entries: its names, of tensors as
    `RENAMES` leaves them; unread: expressions of names that carry nothing we need. interleaves: the language model's
    rope turns by time, height and width, mixed (True) or one behind another (False). encoders: the kinds that are
    known, of families that have several; with others, the language model is served alone. language: what images
    change in the language model."""

    read: Callable[[HFConfig, ModelSpec], VisionSpec]
    entries: Entries
    unread: tuple[str, ...] = ()
    interleaves: bool | None = None
    encoders: tuple[str, ...] = ()
    language: Callable[[ModelSpec], ModelSpec] = lambda spec: spec


RENAMES = (
    (r"^(?:model\.)?(?:vision_tower\.vision_model|vision_model|vision_tower)\.", "vision_tower."),
    (r"^(?:model\.)?(visual|multi_modal_projector|connector|aligner)\.", r"\1."),
    (r"^(?:model\.)?image_newline$", "image_newline"),
)
"""From the names that versions of transformers have to those of entries."""
UNREAD = (r"^vision_tower\.embeddings\.position_ids$", r"^vision_tower\.head\.")
"""Buffers and heads of all."""
VIT: Mapping[str, Any] = dict(
    hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, image_size=224,
    num_channels=3, patch_size=16, hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6,
)  # fmt: skip
"""SigLIP's sizes."""
SECTIONS = {(64, False): (16, 24, 24), (64, True): (24, 20, 20), (32, False): (8, 12, 12), (32, True): (11, 11, 10)}
"""How many of so many frequencies, in sections or interleaved, turn by time, height and width where a config does not
say."""
VIT_NAMES: Entries = {
    "embed_patches": Stored(name="vision_tower.embeddings.patch_embedding", reshape=True),
    "embed_positions": "vision_tower.embeddings.position_embedding",
    "embed_norm": "vision_tower.pre_layrnorm",
    "final_norm": "vision_tower.post_layernorm",
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.o_proj": "self_attn.out_proj",
    "attn_norm": "layer_norm1",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
    "mlp_norm": "layer_norm2",
}


def vit(config: HFConfig, *, num_layers: int = 0, **options: Any) -> ModelSpec:
    """A transformer over patches with this config's sizes: layer norms before both blocks, biases, no rope.

    num_layers: how many of its layers are of use; 0: all. options: as `gpt_like` takes them.
    """
    config = config.replace(num_hidden_layers=num_layers or config.num_layers(), tie_word_embeddings=False)
    num_features = config.size("num_channels") * config.size("patch_size") ** 2
    common = dict(kind="encoder", vocab_size=0, max_position_embeddings=0, num_features=num_features)
    return gpt_like(config, **{**common, **options})


def pixtral(config: HFConfig) -> tuple[ModelSpec, dict[str, Any]]:
    """Patches of images of any size, turned by row and column, with RMS norms and gated blocks; as `tower`."""
    config = config.with_defaults(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, num_channels=3,
        patch_size=16, hidden_act="gelu",
    )  # fmt: skip
    rope = grid_rope(config, alternating=True, theta=config.rope_parameters().number("rope_theta", 10000.0))
    encoder = vit(
        config, norm=NormSpec(eps=1e-5), attn={"rope": rope}, attn_bias=False, mlp_bias=False, mlp={"gated": True},
        embed_norm=True, final_norm=False,
    )  # fmt: skip
    return encoder, dict(patch_size=config.size("patch_size"), patch_bias=False)


def tower(config: HFConfig, *, num_layers: int = 0, final_norm: bool = True) -> tuple[ModelSpec, dict[str, Any]]:
    """The encoder of a vision_config, CLIP's or one like SigLIP's, and fields of a VisionSpec that come with it."""
    if config.model_type == "pixtral":
        return pixtral(config)
    is_clip = config.model_type == "clip_vision_model"
    if not is_clip and config.model_type not in (
        "siglip_vision_model",
        "idefics3",
        "idefics3_vision",
        "smolvlm_vision",
    ):
        raise ModelError(f"{config.file} describes an encoder of images {config.model_type!r}, which is not known")
    defaults = {**VIT, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5} if is_clip else VIT
    config = config.with_defaults(**defaults)
    side = config.size("image_size") // config.size("patch_size")
    encoder = vit(
        config,
        num_layers=num_layers,
        num_learned_positions=side * side + is_clip,
        embed_norm=is_clip,
        final_norm=final_norm,
    )
    return encoder, dict(patch_size=config.size("patch_size"), has_class=is_clip, patch_bias=not is_clip)


def grid_rope(
    config: HFConfig, *, alternating: bool = False, columns_first: bool = False, theta: float = 10000.0, **fields: Any
) -> RopeSpec:
    """Half of the frequencies turn by the row of a patch, half by its column."""
    head_dim = config.size("hidden_size") // config.size("num_attention_heads")
    quarter = head_dim // 4
    axes = (0,) * quarter + (1,) * quarter
    return RopeSpec(
        rotary_dim=head_dim,
        theta=theta,
        axes=axes[::-1] if columns_first else axes,
        **fields,
        frequencies="alternating" if alternating else "repeated",
    )


def projector(
    sizes: Sequence[int], names: Sequence[str], activation: Activation | None, *, bias: bool = True, **fields: Any
) -> ProjectorSpec:
    """Linear layers between these sizes, with an activation between them."""
    last = len(names) - 1
    dense = tuple(
        DenseSpec(
            name=name,
            in_features=sizes[n],
            out_features=sizes[n + 1],
            bias=bias,
            activation=activation if n < last else None,
        )
        for n, name in enumerate(names)
    )
    return ProjectorSpec(dense=dense, **fields)


def two_linears(config: HFConfig, size: int, spec: ModelSpec, *, bias: bool = True, **fields: Any) -> ProjectorSpec:
    """From rows of a size to the language model's through two linear layers, as LLaVA has them."""
    return projector(
        (size, spec.hidden_size, spec.hidden_size),
        ("linear_1", "linear_2"),
        read_activation(config.with_defaults(projector_hidden_act="gelu"), "projector_hidden_act"),
        bias=bias,
        **fields,
    )


def vision_entries(
    modules: Entries, *, layer: str, tensors: Entries = NOTHING, prefix: str = "vision."
) -> Mapping[str, str | Stored]:
    """Names of an encoder, which ours begin with `prefix`, and of projectors; see `name_table`."""
    entries = name_table(modules, layer=layer, tensors=tensors).entries
    return {ours if ours.startswith(PROJECTORS) else prefix + ours: stored for ours, stored in entries.items()}


def turn_by_axes(config: HFConfig, spec: ModelSpec, interleaves: bool) -> ModelSpec:
    """The language model with M-RoPE (Qwen2-VL): its frequencies turn by time, height or width of a token.

    interleaves: the three take turns while height and width have frequencies left; else they stand in sections.
    """
    stated = text_config(config).rope_parameters().get("mrope_section")
    by_rope: dict[RopeSpec, RopeSpec] = {}

    def turn(layer: LayerSpec) -> Mapping[str, Any]:
        rope = layer.attn.rope
        if rope is None:
            return {}
        count = rope.rotary_dim // 2
        sections = [int(size) for size in stated or SECTIONS.get((count, interleaves), ())]
        if interleaves:
            axes = [n % 3 if len(sections) == 3 and n < 3 * sections[n % 3] else 0 for n in range(count)]
        elif min(sections, default=0) < 0 or sum(sections) != count:
            raise ModelError(f"mrope_section in {config.file} is {sections}, which makes no {count} frequencies")
        else:
            axes = [axis for axis, size in enumerate(sections) for _ in range(size)]
        turned = by_rope.setdefault(rope, dataclasses.replace(rope, axes=tuple(axes)))
        return {"attn": dataclasses.replace(layer.attn, rope=turned)}

    return replace_layers(spec, turn)


def vision_config(config: HFConfig, model_type: str) -> HFConfig:
    """The config of the encoder of images; of this kind, if it does not say."""
    inner = HFConfig(config.mapping("vision_config"), file=f"vision_config of {config.file}")
    return inner.with_defaults(model_type=model_type)


def image_token(config: HFConfig) -> int:
    """The token in whose places an image's rows go, as old and new configs name it."""
    return config.integer("image_token_id" if config.get("image_token_id") is not None else "image_token_index")


def with_vision(spec: ModelSpec, vision: VisionSpec) -> ModelSpec:
    """The language model, reading images. Raises ModelError for rows of another size than its own."""
    width = vision.projector.dense[-1].out_features
    if width != spec.hidden_size:
        raise ModelError(f"images become rows of {width} numbers, and the language model takes {spec.hidden_size}")
    return dataclasses.replace(spec, vision=vision)
