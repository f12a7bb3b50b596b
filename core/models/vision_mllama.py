"""Llama 3.2 Vision as data: two encoders over tiles, and layers of the decoder that attend to what they make."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..errors import ModelError
from ..weights.names import Stored
from .config import HFConfig
from .families.mllama_text_model import NUM_EXTRA_TOKENS
from .llama_like import replace_attention, replace_layers
from .spec import NO_ATTENTION, CrossSpec, LayerSpec, ModelSpec, NormSpec
from .vision_like import VIT_NAMES, VisionFamily, image_token, projector, vision_config, vision_entries, vit
from .vision_spec import VisionSpec

_TOWER = "vision_tower."
_PLACES = f"{_TOWER}gated_positional_embedding."
_SHAPES = [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]]


def _read(config: HFConfig, spec: ModelSpec) -> VisionSpec:
    """All patches of all tiles see each other, in some layers and then, with gates, in others."""
    inner = vision_config(config, "mllama_vision_model").with_defaults(
        hidden_size=1280, hidden_act="gelu", num_hidden_layers=32, num_global_layers=8, num_channels=3,
        intermediate_size=5120, image_size=448, patch_size=14, norm_eps=1e-5, max_num_tiles=4, attention_heads=16,
        intermediate_layers_indices=[3, 7, 15, 23, 30], supported_aspect_ratios=_SHAPES,
    )  # fmt: skip
    config = config.with_defaults(image_token_index=128256)
    inner = inner.with_defaults(num_attention_heads=inner.size("attention_heads"))
    side, joined = inner.size("image_size") // inner.size("patch_size"), inner["intermediate_layers_indices"]
    shapes = tuple((int(rows), int(columns)) for rows, columns in inner["supported_aspect_ratios"])
    norm = NormSpec(kind="layer", eps=inner.number("norm_eps"), bias=True)
    encoder = vit(inner, norm=norm, num_learned_positions=side**2 + 1, embed_norm=True)
    encoder = replace_attention(encoder, qkv_bias=False, o_bias=False, has_padding=True)
    num_places = (len(shapes) + 1) * inner.size("max_num_tiles")
    second = dataclasses.replace(
        encoder,
        layers=encoder.layers[:1] * inner.num_layers("num_global_layers"),
        num_learned_positions=num_places,
        embed_norm=False,
        final_norm=False,
    )
    size = encoder.hidden_size * (1 + len(joined))
    if inner.size("vision_output_dim", size) != size:
        raise ModelError(f"vision_output_dim in {inner.file} is not {size}, what its layers make together")
    return VisionSpec(
        encoder=encoder,
        projector=projector((size, spec.hidden_size), ("linear",), None),
        image_token_id=image_token(config),
        patch_size=inner.size("patch_size"),
        patch_bias=False,
        has_class=True,
        second=second,
        joined=tuple(range(encoder.num_layers)[i] for i in joined),
        tile_shapes=shapes,
        max_tiles=inner.size("max_num_tiles"),
    )


def _cross(spec: ModelSpec) -> ModelSpec:
    """The language model, with the layers that do nothing without images."""
    own = next(layer for layer in spec.layers if layer.has_attention)
    cross = CrossSpec(
        num_heads=own.attn.num_heads,
        num_kv_heads=own.attn.num_kv_heads,
        head_dim=own.attn.head_dim,
        scale=own.attn.scale,
        qk_norm=spec.norm,
        gated=True,
    )

    def cross_layer(layer: LayerSpec) -> Mapping[str, Any]:
        return {} if layer.has_attention else {"attn": NO_ATTENTION, "mlp": own.mlp, "cross": cross}

    return dataclasses.replace(replace_layers(spec, cross_layer), num_extra_tokens=NUM_EXTRA_TOKENS)


def _gated(name: str) -> Mapping[str, Any]:
    """Fields of what a gate of a layer scales."""
    return {"scaled_by": f"gate_{name}", "gate": "tanh"}


_MODULES: Mapping[str, str | Stored] = {
    **{f"attn.{name}_proj": f"self_attn.{name}_proj" for name in "qkv"},
    **{f"mlp.{name}": VIT_NAMES[f"mlp.{name}"] for name in ("up_proj", "down_proj")},
    "attn.o_proj": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
_FIRST = vision_entries(
    {
        **_MODULES,
        "embed_patches": Stored(name=f"{_TOWER}patch_embedding", reshape=True),
        "embed_norm": f"{_TOWER}layernorm_pre",
        "final_norm": f"{_TOWER}layernorm_post",
    },
    layer=f"{_TOWER}transformer.layers.{{i}}.",
    tensors={
        "embed_class.weight": Stored(name=f"{_TOWER}class_embedding", reshape=True),
        "embed_positions.weight": Stored(name=f"{_PLACES}embedding", scaled_by=f"{_PLACES}gate", gate="rest"),
        "embed_tile_patches.weight": Stored(
            name=f"{_PLACES}tile_embedding.weight", reshape=True, scaled_by=f"{_PLACES}gate", gate="tanh"
        ),
        "embed_tiles.weight": Stored(
            name=f"{_TOWER}pre_tile_positional_embedding.embedding.weight",
            reshape=True,
            scaled_by=f"{_TOWER}pre_tile_positional_embedding.gate",
            gate="tanh",
        ),
    },
    projectors={"projector.linear": Stored(name="multi_modal_projector", joined=True)},
)
_SECOND = vision_entries(
    {
        **_MODULES,
        "attn.o_proj": Stored(name="self_attn.o_proj", **_gated("attn")),
        "mlp.down_proj": Stored(name="mlp.fc2", **_gated("ffn")),
    },
    layer=f"{_TOWER}global_transformer.layers.{{i}}.",
    tensors={
        "embed_positions.weight": Stored(
            name=f"{_TOWER}post_tile_positional_embedding.embedding.weight",
            reshape=True,
            scaled_by=f"{_TOWER}post_tile_positional_embedding.gate",
            gate="tanh",
        )
    },
    projectors={},
)
_LAYER = "model.layers.{i}."
_LANGUAGE: Mapping[str, str | Stored] = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "layers.{i}.cross_norm.weight": f"{_LAYER}input_layernorm.weight",
    **{
        f"layers.{{i}}.cross.{name}.weight": f"{_LAYER}cross_attn.{name}.weight"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    },
    "layers.{i}.cross.gate": Stored(name=f"{_LAYER}cross_attn_attn_gate", is_scalar=True, gate="tanh"),
    "layers.{i}.cross.mlp_gate": Stored(name=f"{_LAYER}cross_attn_mlp_gate", is_scalar=True, gate="tanh"),
}
MLLAMA = VisionFamily(
    read=_read,
    entries={
        **_FIRST,
        **{name.replace("vision.", "second.", 1): stored for name, stored in _SECOND.items()},
        **_LANGUAGE,
    },
    renames=(
        (r"^(?:model\.)?vision_model\.", _TOWER),
        (r"^(?:model\.)?multi_modal_projector\.", "multi_modal_projector."),
    ),
    language=_cross,
)
