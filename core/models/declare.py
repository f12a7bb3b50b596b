"""The parameters of a spec, in the order in which a forward pass reads them: what a pass over nothing asks for."""

import inspect
from collections.abc import Callable
from typing import Any, get_origin

from ..ops.table import OpTable, op_names
from ..stages import EncoderBatch, ForwardBatch, KVCaches, PoolingBatch
from .decoder import compute_logits, decoder
from .encoder import encoder
from .encoder_decoder import encode, write_cross
from .params import Param
from .pooler import pool
from .scope import Declared
from .spec import ModelSpec
from .vision import rows_of_images
from .vision_spec import VisionSpec


def declare_params(spec: ModelSpec) -> tuple[Param, ...]:
    """Every parameter of a model. A tied model has no lm_head.weight: embed_tokens.weight serves as both."""
    if spec.foreign is not None:
        return spec.foreign.params
    found, kv = Declared(), _caches(spec)
    if spec.kind == "encoder":
        encoder(_OPS, spec, found, _BATCH)
    else:
        decoder(_OPS, spec, found, kv, _BATCH)
    if spec.pooler is not None:  # then there is no head for tokens
        pool(_OPS, spec, found, _SOMETHING, _POOLED)
    elif spec.kind != "encoder":
        compute_logits(_OPS, spec, found, _SOMETHING)
    if spec.encoder is not None:
        encode(_OPS, spec, found, kv, _inputs(num_windows=len(spec.encoder.convolutions)))
    if spec.vision is not None:
        _read_images(spec.vision, found)
        if spec.vision.is_crossed:
            write_cross(_OPS, spec, found, kv, _inputs(), _SOMETHING)
    return tuple(found.params.values())


def image_params(vision: VisionSpec) -> tuple[Param, ...]:
    """What reads images: encoder and projectors."""
    found = Declared()
    _read_images(vision, found)
    return tuple(found.params.values())


def _read_images(vision: VisionSpec, found: Declared) -> None:
    has_corners = vision.num_corners or vision.tile_shapes
    rows_of_images(_OPS, vision, found, _inputs(num_corners=1 if has_corners else 0))


def _silent(name: str) -> Callable[..., Any]:
    """In the place of an op: gives something of no value, as often as the op gives results."""
    returned = inspect.signature(getattr(OpTable, name)).return_annotation
    if get_origin(returned) is not tuple:
        return lambda *_, **__: _SOMETHING
    if returned.__args__[-1] is ...:  # of split: as many as it is given sizes
        return lambda _, sizes: (_SOMETHING,) * len(sizes)
    return lambda *_, **__: (_SOMETHING,) * len(returned.__args__)


_SOMETHING = object()
_OPS = OpTable({name: _silent(name) for name in op_names()})
_BATCH = ForwardBatch(
    input_ids=_SOMETHING,
    positions=_SOMETHING,
    query_start_loc=_SOMETHING,
    seq_lens=_SOMETHING,
    block_tables=(_SOMETHING,),
    slot_mappings=(_SOMETHING,),
    logits_indices=_SOMETHING,
    token_types=_SOMETHING,
    encoder_lens=_SOMETHING,
    adapters=_SOMETHING,
)
_POOLED = PoolingBatch(starts=_SOMETHING, ends=_SOMETHING)


def _caches(spec: ModelSpec) -> KVCaches:
    each = (_SOMETHING,) * spec.num_layers
    groups, states = (0,) * spec.num_layers, ((_SOMETHING,) * 3,) * spec.num_layers
    return KVCaches(layers=each, group_of_layer=groups, states=states, cross=each)


def _inputs(*, num_windows: int = 0, num_corners: int = 0) -> EncoderBatch:
    return EncoderBatch(
        positions=_SOMETHING,
        query_start_loc=_SOMETHING,
        slot_mapping=_SOMETHING,
        windows=(_SOMETHING,) * num_windows,
        corner_ids=(_SOMETHING,) * num_corners,
        corner_weights=(_SOMETHING,) * num_corners,
    )
