"""Attention over pages by a library that takes a part of what is asked, beside kernels that take all of it."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

Attend = Callable[..., Any]
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""query_start_loc, seq_lens, block_table"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a call asks of attention, as the declaration in core/ops/attention.py names it."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    causal: bool = True
    max_query_len: int = 0
    max_seq_len: int = 0


class Beside(ABC):
    """`paged_attention`; `others` computes what `attend` gives back, and all that has chunks, sinks, slopes, biases
    or sight ahead, for which no library has an argument."""

    def __init__(self, others: Attend) -> None:
        self._others = others

    def __call__(
        self,
        query: Any,
        kv_cache: Any,
        query_start_loc: Any,
        seq_lens: Any,
        block_table: Any,
        *,
        scale: float,
        window: int = 0,
        chunk: int = 0,
        softcap: float = 0.0,
        causal: bool = True,
        max_query_len: int = 0,
        max_seq_len: int = 0,
        **terms: Any,
    ) -> Any:
        batch = (query_start_loc, seq_lens, block_table)
        lengths = {"max_query_len": max_query_len, "max_seq_len": max_seq_len}
        options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "causal": causal, **lengths}
        if chunk and not 0 < max_seq_len <= chunk:  # a request may outgrow it
            terms["chunk"] = chunk
        if len(query) and all(value is None for value in terms.values()):
            out = self.attend(query, kv_cache, batch, Asked(**options))
            if out is not None:
                return out
        return self._others(query, kv_cache, *batch, **options, **terms)

    @abstractmethod
    def attend(self, query: torch.Tensor, kv_cache: Any, batch: Batch, asked: Asked) -> torch.Tensor | None:
        """The result, [num_tokens, num_heads, head_dim]; None for what the library does not take."""

    def error(self, new_kv_cache: Attend, *, num_heads: int, kind: Asked, **shape: Any) -> float:
        """The normalised mean square error of a chunk and a prompt against `others`, over a cache of random numbers.

        shape: what `new_kv_cache` takes, less num_blocks. kind: its scale, window and softcap count.
        """
        size, device = shape["block_size"], shape["device"]
        counts, lens = (7, 3 * size + 5), (2 * size + 9, 3 * size + 5)
        widths = [-(-length // size) for length in lens]
        cache = new_kv_cache(num_blocks=sum(widths) + 1, **shape)
        for part in cache:
            part.normal_()
        query = torch.randn(sum(counts), num_heads, shape["head_dim"], device=device).to(cache[0].dtype)
        table = torch.full((2, max(widths)), -1, dtype=torch.int32)
        table[0, : widths[0]] = torch.arange(1, widths[0] + 1)
        table[1, : widths[1]] = torch.arange(widths[0] + 1, sum(widths) + 1)
        starts = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32)
        batch = [part.to(device) for part in (starts, torch.tensor(lens, dtype=torch.int32), table)]
        options = asdict(replace(kind, max_query_len=max(counts), max_seq_len=max(lens)))
        with torch.inference_mode():
            got, want = (attend(query, cache, *batch, **options).double() for attend in (self, self._others))
            return float((got - want).square().sum() / want.square().sum())
