"""Encoders of images as data: what CLIP, SigLIP and Qwen's share, config keys and names of weights alike."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ModelError
from ..weights.names import Stored
from .bert_like import biased_layer
from .config import HFConfig
from .llama_like import replace_layers
from .name_tables import name_table
from .spec import (
    Activation,
    DenseSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    ProjectorSpec,
    RopeSpec,
    VisionSpec,
)
from .wrappers import text_config

Entries = Mapping[str, str | Stored]
VIT: Mapping[str, Any] = dict(
    hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, image_size=224,
    num_channels=3, patch_size=16, hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6,
)  # fmt: skip
"""SigLIP's sizes."""
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


def vit(config: HFConfig, *, num_layers: int = 0, norm: NormSpec | None = None, **changes: Any) -> ModelSpec:
    """A transformer over patches with this config's sizes: norms before both blocks, biases, learned positions.

    num_layers: how many of its layers are of use; 0: all. changes: of fields of the spec.
    """
    fields = dict(
        model_type=config.model_type,
        vocab_size=0,
        hidden_size=config.size("hidden_size"),
        max_position_embeddings=0,
        layers=(biased_layer(config),) * (num_layers or config.num_layers()),
        norm=norm or NormSpec(kind="layer", eps=config.number("layer_norm_eps"), bias=True),
        kind="encoder",
        num_features=config.size("num_channels") * config.size("patch_size") ** 2,
        dtype=config.dtype,
    )
    return ModelSpec(**{**fields, **changes})


def tower(config: HFConfig, *, num_layers: int = 0, final_norm: bool = True) -> tuple[ModelSpec, dict[str, Any]]:
    """The encoder of a vision_config, CLIP's or one like SigLIP's, and fields of a VisionSpec that come with it."""
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


def grid_rope(head_dim: int, *, alternating: bool = False, theta: float = 10000.0) -> RopeSpec:
    """Half of the frequencies turn by the row of a patch, half by its column."""
    quarter = head_dim // 4
    return RopeSpec(
        rotary_dim=head_dim,
        theta=theta,
        axes=(0,) * quarter + (1,) * quarter,
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


def vision_entries(modules: Entries, *, layer: str, tensors: Entries | None = None, projectors: Entries) -> Entries:
    """Canonical names of an encoder and of projectors -> stored ones. modules, tensors: as `name_table` takes them;
    projectors: canonical modules, written out."""
    encoder = name_table(modules, layer=layer, tensors=tensors).entries
    entries = {f"vision.{name}": stored for name, stored in encoder.items()}
    for ours, theirs in projectors.items():
        stored = theirs if isinstance(theirs, Stored) else Stored(name=theirs)
        for leaf in ("weight", "bias"):
            name = f"{stored.name}.{leaf}" if not stored.transpose else stored.name
            entries[f"{ours}.{leaf}"] = dataclasses.replace(stored, name=name)
    return entries


def turn_by_axes(config: HFConfig, spec: ModelSpec, interleaves: bool) -> ModelSpec:
    """The language model with M-RoPE (Qwen2-VL): its frequencies turn by time, height or width of a token.

    interleaves: the three take turns while height and width have frequencies left; else they stand in sections.
    """
    sections = [int(size) for size in text_config(config).rope_parameters().get("mrope_section") or (16, 24, 24)]
    by_rope: dict[RopeSpec, RopeSpec] = {}

    def turn(layer: LayerSpec) -> Mapping[str, Any]:
        rope = layer.attn.rope
        if rope is None:
            return {}
        count = rope.rotary_dim // 2
        if interleaves:
            axes = [n % 3 if n < 3 * sections[n % 3] else 0 for n in range(count)]
        else:
            axes = [axis for axis, size in enumerate(sections) for _ in range(size)]
        if len(axes) != count:
            raise ModelError(f"mrope_section in {config.file} is {sections}, which makes no {count} frequencies")
        turned = by_rope.setdefault(rope, dataclasses.replace(rope, axes=tuple(axes)))
        return {"attn": dataclasses.replace(layer.attn, rope=turned)}

    return replace_layers(spec, turn)


def image_token(config: HFConfig) -> int:
    """The token in whose places an image's rows go, as old and new configs name it."""
    return config.integer("image_token_id" if config.get("image_token_id") is not None else "image_token_index")


def with_vision(spec: ModelSpec, vision: VisionSpec) -> ModelSpec:
    """The language model, reading images. Raises ModelError for rows of another size than its own."""
    width = vision.projector.dense[-1].out_features
    if width != spec.hidden_size:
        raise ModelError(f"images become rows of {width} numbers, and the language model takes {spec.hidden_size}")
    return dataclasses.replace(spec, vision=vision)
