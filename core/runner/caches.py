"""The caches of all layers, allocated group by group: what every runner over an op table does in the same way."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..kv.groups import KVGroup, cross_group, group_of_layer, state_group
from ..models.spec import ModelSpec
from ..ops import OpTable
from ..stages import Array, KVCaches
from ..weights.source import HostTensor


class CacheArrays(NamedTuple):
    """The arrays of KVCaches, which a compiled step takes and gives."""

    layers: Sequence[Any]
    states: Sequence[Sequence[Any]]
    cross: Sequence[Any]
    images: Any

    @classmethod
    def of(cls, caches: KVCaches) -> "CacheArrays":
        """Those of these caches."""
        states = [tuple(layer) for layer in caches.states]
        return cls(list(caches.layers), states, list(caches.cross), caches.images)

    def put_in(self, caches: KVCaches) -> KVCaches:
        """`caches` with these arrays."""
        return dataclasses.replace(caches, **self._asdict())


def new_caches(
    ops: OpTable,
    groups: Sequence[KVGroup],
    num_blocks: Sequence[int],
    *,
    num_layers: int,
    block_size: int,
    dtype: str,
    kv_dtype: str = "",
    device: Any,
    state_device: Any = None,
    num_image_rows: int = 0,
    image_row_size: int = 0,
) -> KVCaches:
    """Zeroed caches of so many blocks per group, and of rows of images.

    kv_dtype: of keys and values, if it is not `dtype`. device: as the ops take it; state_device: that of states.
    """
    layers: list[Array] = [None] * num_layers
    states: list[Sequence[Array]] = [()] * num_layers
    cross: list[Array] = [None] * num_layers
    for count, group in zip(num_blocks, groups, strict=True):
        for layer, (num_kv_heads, head_dim) in group.attention_layers():
            cache = ops.new_kv_cache(
                num_blocks=count,
                block_size=block_size,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                dtype=kv_dtype or dtype,
                device=device,
            )
            if group.kind == "cross":
                cross[layer] = cache
            else:
                layers[layer] = cache
        for layer, shapes in group.state_layers():
            states[layer] = tuple(
                ops.new_state(
                    num_slots=group.num_slots(count, block_size),
                    shape=shape.shape,
                    dtype="float32" if shape.is_float32 else dtype,
                    device=device if state_device is None else state_device,
                )
                for shape in shapes
            )
    return KVCaches(
        layers=layers,
        group_of_layer=group_of_layer(groups, num_layers),
        states=states,
        state_group=state_group(groups),
        cross=cross,
        cross_group=cross_group(groups),
        images=_new_rows(ops, (num_image_rows, image_row_size), dtype, device) if num_image_rows else None,
    )


def image_row_size(spec: ModelSpec) -> int:
    """Numbers that are kept for each place of an image in a prompt."""
    return spec.hidden_size * spec.vision.num_row_parts if spec.vision is not None else 0


def _new_rows(ops: OpTable, shape: tuple[int, int], dtype: str, device: Any) -> Array:
    zeros = HostTensor(name="images", dtype="float32", shape=shape, data=np.zeros(shape, np.float32))
    return ops.upload(zeros, dtype=dtype, device=device)
