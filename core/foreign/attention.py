"""Our attention behind transformers' interface: one that notes what a model asks for, and one that computes it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import ModelError
from ..models.spec import AttentionSpec
from ..ops import OpTable
from ..stages import Array, ForwardBatch, KVCaches

NAME = "headrace"
"""Of the attention that computes. Masks have no function of this name, so that models build none."""
PROBE = "headrace_probe"
_ATTRIBUTE = "headrace_attention"
_IRRELEVANT = frozenset({
    "dropout", "is_causal", "sliding_window", "position_ids", "cache_position", "use_cache", "output_attentions",
    "output_hidden_states", "output_router_logits", "return_dict", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
    "max_length_k", "position_embeddings", "logits_to_keep", "num_items_in_batch",
})  # fmt: skip
"""What models pass along that the batch says better: masks are the authority on windows."""
_FAR = 1 << 17
"""Where masks are looked at: beyond any window, and no multiple of a chunk's length when one is taken off."""


@dataclass(kw_only=True)
class Probe:
    """Notes the attention of a model that is made with the attention PROBE and runs on shapes alone."""

    names: dict[int, str] = field(default_factory=dict)
    """of modules, by identity; filled before the model runs"""
    called: list[str] = field(default_factory=list)
    """names of modules that attended, in this order"""
    layers: list[AttentionSpec] = field(default_factory=list)
    """what they asked for"""

    def __post_init__(self) -> None:
        ALL_ATTENTION_FUNCTIONS.register(PROBE, self.attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE, self.mask)

    def mask(self, *, q_length: int, kv_length: int, mask_function: Callable[..., Any], **_: Any) -> torch.Tensor:
        """Stands for a mask; says which window it leaves open."""
        mask = torch.empty((1, 1, q_length, kv_length), dtype=torch.bool, device="meta")
        mask.headrace_window = _window(mask_function)  # type: ignore[attr-defined]
        return mask

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **rest: Any,
    ) -> tuple[torch.Tensor, None]:
        """Note one layer: [1, heads, num_tokens, head_dim] each. Raises ModelError for what cannot be paged."""
        name = self.names[id(module)]
        unknown = sorted(k for k, v in rest.items() if k not in _IRRELEVANT and v is not None and v is not False)
        window = getattr(attention_mask, "headrace_window", None)
        if unknown:
            raise ModelError(f"{name} passes {', '.join(unknown)} to its attention")
        if window is None:
            raise ModelError(f"the mask of {name} is neither causal nor a sliding window")
        if name in self.called:
            raise ModelError(f"{name} attends twice for each token")
        self.called.append(name)
        num_heads, num_tokens, head_dim = query.shape[1:]
        self.layers.append(
            AttentionSpec(
                num_heads=num_heads,
                num_kv_heads=key.shape[1],
                head_dim=head_dim,
                scale=head_dim**-0.5 if scaling is None else float(scaling),
                window=window,
                softcap=softcap or 0.0,
                sinks=s_aux is not None,
            )
        )
        return query.new_empty((1, num_tokens, num_heads, value.shape[-1])), None


def _window(mask_function: Callable[..., Any]) -> int | None:
    """Tokens that a token sees by a mask, 0 for all before it; None for a mask of another kind."""
    windows = []
    with torch.device("cpu"):  # all else is on shapes alone
        keys = torch.arange(_FAR + 8)
        for query in (_FAR, _FAR - 4099):
            try:
                seen = torch.as_tensor(mask_function(0, 0, torch.tensor(query), keys)).expand(keys.shape)
                count = int(seen.sum())
            except (RuntimeError, IndexError, NotImplementedError):  # it looks at the batch
                return None
            if not seen[query - count + 1 : query + 1].all():
                return None
            windows.append(0 if count == query + 1 else count)
    return windows[0] if windows[0] == windows[1] else None


class PagedAttention:
    """Attention of the layers of one module over paged caches. Between `begin` and the end of a forward pass each
    layer is called once, and leaves its cache in `layers`."""

    def __init__(self, ops: OpTable, attention: tuple[AttentionSpec, ...]) -> None:
        self._ops = ops
        self._specs = attention
        self._batch: ForwardBatch | None = None
        self._groups: list[int] = []
        self.layers: list[Array] = []

    def install(self, module: torch.nn.Module, names: tuple[str, ...]) -> None:
        """Be the attention of these parts of a module that was made with the attention NAME."""
        for layer, name in enumerate(names):
            setattr(module.get_submodule(name), _ATTRIBUTE, partial(self.attend, layer))

    def begin(self, kv: KVCaches, batch: ForwardBatch) -> None:
        """What the next forward pass reads and writes."""
        self.layers, self._groups, self._batch = list(kv.layers), list(kv.group_of_layer), batch

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """[1, heads, num_tokens, head_dim] each; returns [1, num_tokens, num_heads, head_dim of value]."""
        batch, spec, group = self._batch, self._specs[layer], self._groups[layer]
        assert batch is not None, "begin comes first"
        value_dim = value.shape[-1]
        if value_dim < key.shape[-1]:
            value = functional.pad(value, (0, key.shape[-1] - value_dim))
        query, key, value = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        cache = self._ops.write_kv(self.layers[layer], key, value, batch.slot_mappings[group])
        self.layers[layer] = cache
        out: torch.Tensor = self._ops.paged_attention(
            query,
            cache,
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_tables[group],
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
            sinks=None if sinks is None else sinks.float(),
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
        )
        return out[..., :value_dim][None]


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    return getattr(module, _ATTRIBUTE)(query, key, value, s_aux), None


ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
