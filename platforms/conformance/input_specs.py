"""Tiny models that read more than the tokens of a text: another input, images, several positions, types."""

import dataclasses

from headrace.core.models.spec import (
    AttentionSpec,
    ConvolutionSpec,
    DenseSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    PoolerSpec,
    Pooling,
    RopeScaling,
    RopeSpec,
)
from headrace.core.models.vision_spec import ProjectorSpec, VisionSpec
from headrace.core.self_test import tiny_spec

NUM_FEATURES = 12
"""Numbers of a frame or patch."""
LAYER_NORM = NormSpec(kind="layer", bias=True)
MOST = 64
"""Positions of an encoder."""


def with_cross_attention(reads_frames: bool) -> ModelSpec:
    """The tiny model with cross attention to an encoder of tokens, or of frames behind two convolutions."""
    convolutions = (ConvolutionSpec(kernel=3), ConvolutionSpec(kernel=3, stride=2)) if reads_frames else ()
    encoder = dataclasses.replace(
        _encoder(64),
        vocab_size=0 if reads_frames else 211,
        num_learned_positions=MOST,
        num_features=NUM_FEATURES if reads_frames else 0,
        convolutions=convolutions,
    )
    spec = tiny_spec()
    cross = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, qkv_bias=True)
    layers = tuple(dataclasses.replace(layer, cross=cross) for layer in spec.layers)
    return dataclasses.replace(spec, kind="encoder_decoder", encoder=encoder, layers=layers)


def with_pooler(kind: Pooling) -> ModelSpec:
    """An encoder of texts with types of tokens, a window, a bias by distance, and a head of two layers."""
    dense = (
        DenseSpec(name="pooler", in_features=64, out_features=64, activation="tanh"),
        DenseSpec(name="classifier", in_features=64, out_features=3),
    )
    spec = _encoder(64, window=5)
    return dataclasses.replace(
        spec,
        vocab_size=211,
        num_learned_positions=MOST,
        num_token_types=2,
        embed_norm=True,
        num_relative_buckets=32,
        pooler=PoolerSpec(kind=kind, dense=dense[:0] if kind == "mean" else dense),
    )


def with_axes() -> ModelSpec:
    """The tiny model, whose ropes turn by three positions of a token."""
    return _with_rope(RopeSpec(rotary_dim=16, axes=(0, 0, 1, 1, 1, 2, 2, 2)))


def with_variants() -> ModelSpec:
    """The tiny model with a row of its ropes' tables for short requests and one for long ones."""
    scaling = RopeScaling(
        kind="longrope",
        factor=8.0,
        original_max_position_embeddings=64,
        short_factor=(1.0,) * 8,
        long_factor=tuple(1.0 + n for n in range(8)),
    )
    return _with_rope(RopeSpec(rotary_dim=16, scaling=scaling))


def with_images(kind: str) -> ModelSpec:
    """The tiny model behind an encoder of images. rows: a learned row before patches, as CLIP's; axes: windows and
    ropes by row and column, and rows that are added behind a layer, as Qwen's; sight: rows are means of patches and
    see each other, as Gemma's."""
    encoder = dataclasses.replace(_encoder(32), num_features=NUM_FEATURES, vocab_size=0, max_position_embeddings=0)
    spec = tiny_spec()
    dense = (
        DenseSpec(name="linear_1", in_features=128, out_features=64, activation="gelu"),
        DenseSpec(name="linear_2", in_features=64, out_features=64),
    )
    projector = ProjectorSpec(dense=dense)
    vision = VisionSpec(encoder=encoder, projector=projector, image_token_id=210, patch_size=2, merge=2)
    match kind:
        case "rows":
            encoder = dataclasses.replace(encoder, num_learned_positions=17, embed_norm=True)
            vision = dataclasses.replace(vision, encoder=encoder, has_class=True)
        case "axes":
            rope = RopeSpec(rotary_dim=16, axes=(0,) * 4 + (1,) * 4, frequencies="repeated")
            layers = tuple(
                dataclasses.replace(layer, attn=dataclasses.replace(layer.attn, rope=rope, in_window=not n))
                for n, layer in enumerate(encoder.layers)
            )
            encoder = dataclasses.replace(encoder, layers=layers)
            taps = ((0, dataclasses.replace(projector, norm=LAYER_NORM)),)
            vision = dataclasses.replace(vision, encoder=encoder, window=8, taps=taps, num_corners=16)
            spec = with_axes()
        case _:
            encoder = dataclasses.replace(encoder, num_learned_positions=16)
            projector = ProjectorSpec(
                dense=(dataclasses.replace(dense[1], in_features=32),), is_mean=True, norm=NormSpec()
            )
            vision = dataclasses.replace(vision, encoder=encoder, projector=projector, sight="image")
            spec = tiny_spec(window=24)
    return dataclasses.replace(spec, vision=vision)


def _with_rope(rope: RopeSpec) -> ModelSpec:
    spec = tiny_spec()
    layers = (dataclasses.replace(x, attn=dataclasses.replace(x.attn, rope=rope)) for x in spec.layers)
    return dataclasses.replace(spec, layers=tuple(layers))


def _encoder(hidden_size: int, window: int = 0) -> ModelSpec:
    """Two layers, of which the second has the window."""
    attn = AttentionSpec(num_heads=hidden_size // 16, num_kv_heads=hidden_size // 16, head_dim=16, scale=0.25)
    attn = dataclasses.replace(attn, qkv_bias=True, o_bias=True)
    mlp = MlpSpec(intermediate_size=88, activation="gelu", gated=False, bias=True)
    layers = tuple(LayerSpec(attn=dataclasses.replace(attn, window=size), mlp=mlp) for size in (0, window))
    return ModelSpec(
        model_type="tiny",
        kind="encoder",
        vocab_size=211,
        hidden_size=hidden_size,
        max_position_embeddings=MOST,
        layers=layers,
        norm=LAYER_NORM,
    )
