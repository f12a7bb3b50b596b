"""KV groups: layers whose KV blocks live and die together. One pool and one block table per group."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..models.mixer import StateShape, state_shapes
from ..models.spec import ModelSpec
from ..weights.source import DTYPE_BYTES

CHECKPOINT_TOKENS = 512
"""How far apart the states are that a prompt leaves for others, besides the one at its end."""


IMAGES_OF_A_REQUEST = 8
"""Images that there is room for, for each request of full length, where cross attention reads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers with one caching policy.

    kind full keeps every block; sliding returns blocks that left the window; state keeps states, not tokens: a block
    holds num_lanes of them; cross keeps what an encoder made of the request's other input, num_tokens of it at most,
    or, of images, as a rule. heads:
    (num_kv_heads, head_dim) per layer, in the order of layer_indices. states: the arrays of one state per layer, in
    the same order.
    """

    kind: Literal["full", "sliding", "state", "cross"]
    layer_indices: tuple[int, ...]
    heads: tuple[tuple[int, int], ...] = ()
    window: int = 0
    states: tuple[tuple[StateShape, ...], ...] = ()
    num_lanes: int = 1
    num_tokens: int = 0
    checkpoint_tokens: int = CHECKPOINT_TOKENS

    def attention_layers(self) -> Iterable[tuple[int, tuple[int, int]]]:
        """(layer, (num_kv_heads, head_dim)) for each layer with keys and values in this group."""
        return zip(self.layer_indices, self.heads, strict=True) if self.heads else ()

    def state_layers(self) -> Iterable[tuple[int, tuple[StateShape, ...]]]:
        """(layer, arrays of one state) for each layer with states."""
        return zip(self.layer_indices, self.states, strict=True) if self.states else ()

    def block_bytes(self, block_size: int, dtype: str, kv_dtype: str = "") -> int:
        """Bytes of one block of all layers in plain arrays of `dtype`, keys and values in kv_dtype if it is given."""
        size, kv_size = DTYPE_BYTES[dtype], DTYPE_BYTES[kv_dtype or dtype]
        scale_bytes = DTYPE_BYTES["float32"] if kv_dtype == "int8" else 0
        keys_and_values = sum(2 * heads * (head_dim * kv_size + scale_bytes) for heads, head_dim in self.heads)
        states = sum(
            math.prod(shape.shape) * (DTYPE_BYTES["float32"] if shape.is_float32 else size)
            for layer in self.states
            for shape in layer
        )
        return block_size * keys_and_values + self.num_lanes * states

    def num_slots(self, num_blocks: int, block_size: int) -> int:
        """Slots of a cache of so many blocks."""
        return num_blocks * (self.num_lanes if self.kind == "state" else block_size)


def kv_groups(spec: ModelSpec, max_model_len: int, num_draft_tokens: int = 0) -> tuple[KVGroup, ...]:
    """The KV groups of a model, full before sliding, then by window, states, cross attention; an encoder has none.

    A window of a chunk's length covers the chunk, and is kept of it. A window that no sequence can outgrow is no
    window: such layers join the full group. Layers that read another's keys and values have none. num_draft_tokens:
    of a row at most.
    """
    if spec.kind == "encoder":
        return ()
    by_window: dict[int, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        if layer.has_attention and layer.attn.kv_layer < 0:
            window = layer.attn.window or layer.attn.chunk
            by_window.setdefault(window if 0 < window < max_model_len else 0, []).append(index)
    groups = [
        KVGroup(
            kind="sliding" if window else "full",
            layer_indices=tuple(layers),
            heads=tuple((spec.layers[i].attn.num_kv_heads, spec.layers[i].attn.head_dim) for i in layers),
            window=window,
        )
        for window, layers in sorted(by_window.items())
    ]
    recurrent = {i: layer.mixer for i, layer in enumerate(spec.layers) if layer.mixer is not None}
    states = tuple(state_shapes(mixer) for mixer in recurrent.values())
    if recurrent:
        lanes = 1 + num_draft_tokens
        groups.append(KVGroup(kind="state", layer_indices=tuple(recurrent), states=states, num_lanes=lanes))
    crosses = {i: layer.cross for i, layer in enumerate(spec.layers) if layer.cross is not None}
    if crosses:
        groups.append(
            KVGroup(
                kind="cross",
                layer_indices=tuple(crosses),
                heads=tuple((cross.num_kv_heads, cross.head_dim) for cross in crosses.values()),
                num_tokens=_num_cross_tokens(spec),
            )
        )
    return tuple(groups)


def _num_cross_tokens(spec: ModelSpec) -> int:
    """How many keys one request is given room for."""
    if spec.encoder is not None:
        return spec.encoder.max_position_embeddings
    assert spec.vision is not None, "cross attention reads what an encoder made"
    return IMAGES_OF_A_REQUEST * spec.vision.max_tiles * spec.vision.encoder.num_learned_positions


def group_of_layer(groups: Sequence[KVGroup], num_layers: int) -> list[int]:
    """The group of each layer's keys and values; 0 for one that has none."""
    found = [0] * num_layers
    for index, group in enumerate(groups):
        for layer, _ in group.attention_layers() if group.kind != "cross" else ():
            found[layer] = index
    return found


def state_group(groups: Sequence[KVGroup]) -> int:
    """The group of states, of which there is one at most; 0 if none is there."""
    return next((index for index, group in enumerate(groups) if group.kind == "state"), 0)


def cross_group(groups: Sequence[KVGroup]) -> int:
    """The group of cross attention, of which there is one at most; 0 if none is there."""
    return next((index for index, group in enumerate(groups) if group.kind == "cross"), 0)
