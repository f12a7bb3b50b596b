"""KV groups: layers whose KV blocks live and die together. One pool and one block table per group."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers with one caching policy.

    kind full keeps every block; sliding returns blocks that left the window. heads: (num_kv_heads, head_dim)
    per layer, in the order of layer_indices.
    """

    kind: Literal["full", "sliding"]
    layer_indices: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    window: int = 0

    @property
    def values_per_token(self) -> int:
        """Keys and values that all layers of the group store for one token."""
        return sum(2 * num_kv_heads * head_dim for num_kv_heads, head_dim in self.heads)


def kv_groups(spec: ModelSpec, max_model_len: int) -> tuple[KVGroup, ...]:
    """The KV groups of a model, full before sliding, then by window; an encoder has none.

    A window that no sequence can outgrow is no window: such layers join the full group.
    """
    if spec.kind == "encoder":
        return ()
    by_window: dict[int, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        window = layer.attn.window
        by_window.setdefault(window if 0 < window < max_model_len else 0, []).append(index)
    return tuple(
        KVGroup(
            kind="sliding" if window else "full",
            layer_indices=tuple(layers),
            heads=tuple((spec.layers[i].attn.num_kv_heads, spec.layers[i].attn.head_dim) for i in layers),
            window=window,
        )
        for window, layers in sorted(by_window.items())
    )


def group_of_layer(groups: Sequence[KVGroup], num_layers: int) -> list[int]:
    """The group of each layer; 0 for one that keeps nothing."""
    found = [0] * num_layers
    for index, group in enumerate(groups):
        for layer in group.layer_indices:
            found[layer] = index
    return found
