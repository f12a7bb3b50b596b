"""The op table of one rank: the platform's ops, and the collectives behind those that read a cut parameter.

A cut weight says itself what its products lack, so that forward functions know of no ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..models.params import Param
from ..ops import OpTable
from ..ops.table import op_names
from ..stages import Array
from .sharding import Share

functional = torch.ops._c10d_functional


@dataclass(frozen=True, slots=True, kw_only=True)
class CutWeight:
    """A packed weight of one rank. by: rows (of a vocabulary), columns (of the input) or experts."""

    by: Literal["rows", "columns", "experts"]
    weight: Array
    first: int
    """row or expert of the whole with which this part begins"""
    count: int
    """rows or experts of this part"""


class Group:
    """The ranks of one model. Every rank calls the same collectives in the same order; all get the same bits."""

    def __init__(self, name: str, *, tp_rank: int, tp_size: int) -> None:
        """name: that of torch's process group."""
        self.name = name
        self.tp_rank = tp_rank
        self.tp_size = tp_size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks; x may be written to."""
        out: torch.Tensor = functional.wait_tensor(functional.all_reduce_(x.contiguous(), "sum", self.name))
        return out

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[n, m] of each rank side by side: [n, tp_size * m]."""
        parts = functional.all_gather_into_tensor(x.contiguous(), self.tp_size, self.name)
        stacked = functional.wait_tensor(parts).view(self.tp_size, *x.shape)
        side_by_side: torch.Tensor = stacked.movedim(0, -2).reshape(*x.shape[:-1], self.tp_size * x.shape[-1])
        return side_by_side

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """What rank 0 has; x may be written to."""
        out: torch.Tensor = functional.wait_tensor(functional.broadcast_(x.contiguous(), 0, self.name))
        return out


def mark_cut(weight: Array, param: Param, share: Share) -> Array:
    """A packed parameter as `rank_ops` takes it: a CutWeight if its products need a collective."""
    by = {"vocab": "rows", "row": "columns", "expert": "experts"}.get(param.shard)
    if by is None or param.kind not in ("linear", "embedding", "stacked") or not share.is_cut(param.name):
        return weight
    own = share.params[param.name][1]
    count = own.num_stacked if by == "experts" else own.shape[0]
    return CutWeight(by=by, weight=weight, first=share.tp_rank * count, count=count)  # type: ignore[arg-type]


def rank_ops(table: OpTable, group: Group) -> OpTable:
    """The table with collectives behind products with cut weights; rank 0 samples for all."""
    ranked: dict[str, Callable[..., Any]] = {name: getattr(table, name) for name in op_names()}
    wrapped = _RankOps(table, group)
    ranked |= {name: getattr(wrapped, name) for name in ("linear", "embedding", "grouped_experts", "sample")}
    return OpTable(ranked)


class _RankOps:
    def __init__(self, table: OpTable, group: Group) -> None:
        self._table = table
        self._group = group

    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        """Partial sums are added, rows of a vocabulary put side by side; the bias of a sum is added once."""
        if not isinstance(weight, CutWeight):
            return self._table.linear(x, weight, bias)
        if weight.by == "rows":
            return self._group.all_gather(self._table.linear(x, weight.weight, bias))
        y = self._group.all_reduce(self._table.linear(x, weight.weight))
        return y if bias is None else y + bias.to(y.dtype)

    def embedding(self, token_ids: Array, weight: Array) -> Array:
        """Each row comes from the rank that holds it."""
        if not isinstance(weight, CutWeight):
            return self._table.embedding(token_ids, weight)
        own = token_ids - weight.first
        is_other = (own < 0) | (own >= weight.count)
        rows = self._table.embedding(own.clamp(0, weight.count - 1), weight.weight)
        return self._group.all_reduce(rows.masked_fill(is_other[:, None], 0))

    def grouped_experts(
        self, x: Array, weights: Array, experts: Array, gate_up: Array, down: Array, *biases: Array, **options: Any
    ) -> Array:
        """Each rank adds up what its experts give."""
        if not isinstance(gate_up, CutWeight):
            return self._table.grouped_experts(x, weights, experts, gate_up, down, *biases, **options)
        own = experts - gate_up.first
        own = torch.where((own < 0) | (own >= gate_up.count), gate_up.count, own)
        y = self._table.grouped_experts(
            x, weights, own, gate_up.weight, down.weight, *biases, **options, partial=True
        )
        return self._group.all_reduce(y)

    def sample(self, logits: Array, *options: Array) -> Array:
        """Ranks have the same logits, but what rank 0 samples counts: a logits processor runs there alone."""
        if self._group.tp_rank:
            return self._group.broadcast(torch.empty(len(logits), dtype=torch.int32, device=logits.device))
        return self._group.broadcast(self._table.sample(logits, *options))
