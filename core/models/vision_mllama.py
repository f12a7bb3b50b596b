"""Llama 3.2 Vision as data: two encoders over tiles, and layers of the decoder that attend to what they make."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from ..errors import ModelError
from ..weights.names import Stored
from .config import HFConfig
from .dense_families import NUM_IMAGE_TOKENS
from .llama_like import layer_norm, replace_layers
from .spec import NO_ATTENTION, ModelSpec
from .vision_like import VIT_NAMES, VisionFamily, image_token, projector, vision_config, vision_entries, vit
from .vision_spec import VisionSpec

_TOWER = "vision_tower."
_PLACES = f"{_TOWER}gated_positional_embedding."
_BEFORE, _BEHIND = (f"{_TOWER}{place}_tile_positional_embedding." for place in ("pre", "post"))
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
    common: dict[str, Any] = dict(
        norm=partial(layer_norm, key="norm_eps"), attn_bias=False, attn={"has_padding": True}
    )
    encoder = vit(inner, num_learned_positions=side**2 + 1, embed_norm=True, **common)
    num_places = (len(shapes) + 1) * inner.size("max_num_tiles")
    num_global = inner.num_layers("num_global_layers")
    second = vit(inner, num_layers=num_global, num_learned_positions=num_places, final_norm=False, **common)
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
    cross = dataclasses.replace(own.attn, rope=None, qk_norm=spec.norm)
    crossed = {"attn": NO_ATTENTION, "mlp": own.mlp, "cross": cross, "cross_gated": True}
    with_cross = replace_layers(spec, lambda layer: {} if layer.has_attention else crossed)
    return dataclasses.replace(with_cross, num_extra_tokens=NUM_IMAGE_TOKENS)


def _gated(stored: str, by: str, gate: Literal["tanh", "rest"] = "tanh", *, reshape: bool = True) -> Stored:
    """What a learned number multiplies."""
    return Stored(name=stored, scaled_by=by, gate=gate, reshape=reshape)


_MODULES: Mapping[str, str | Stored] = {
    **{f"attn.{name}_proj": f"self_attn.{name}_proj" for name in "qkv"},
    **{f"mlp.{name}": VIT_NAMES[f"mlp.{name}"] for name in ("up_proj", "down_proj")},
    "attn.o_proj": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
_FIRST = vision_entries(
    {
        **_MODULES, "embed_patches": Stored(name=f"{_TOWER}patch_embedding", reshape=True),
        "embed_norm": f"{_TOWER}layernorm_pre", "final_norm": f"{_TOWER}layernorm_post",
        "projector.linear": Stored(name="multi_modal_projector", joined=True),
    },
    layer=f"{_TOWER}transformer.layers.{{i}}.",
    tensors={
        "embed_class.weight": Stored(name=f"{_TOWER}class_embedding", reshape=True),
        "embed_positions.weight": _gated(f"{_PLACES}embedding", f"{_PLACES}gate", "rest", reshape=False),
        "embed_tile_patches.weight": _gated(f"{_PLACES}tile_embedding.weight", f"{_PLACES}gate"),
        "embed_tiles.weight": _gated(f"{_BEFORE}embedding.weight", f"{_BEFORE}gate"),
    },
)  # fmt: skip
_SECOND = vision_entries(
    {
        **_MODULES, "attn.o_proj": _gated("self_attn.o_proj", "gate_attn", reshape=False),
        "mlp.down_proj": _gated("mlp.fc2", "gate_ffn", reshape=False),
    },
    layer=f"{_TOWER}global_transformer.layers.{{i}}.",
    tensors={"embed_positions.weight": _gated(f"{_BEHIND}embedding.weight", f"{_BEHIND}gate")},
    prefix="second.",
)  # fmt: skip
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
MLLAMA = VisionFamily(read=_read, entries={**_FIRST, **_SECOND, **_LANGUAGE}, language=_cross)
