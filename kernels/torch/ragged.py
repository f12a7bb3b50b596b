"""Ops over the rows of whole requests in plain torch operations of static shapes, no value read on the host.

A request is told from its neighbours by a mask, so that shapes are those of the batch alone.
"""

import math

import torch

QUERY_TILE = 128
"""Queries that meet all keys of the batch at a time: scores take [num_heads, QUERY_TILE, num_tokens] float32."""


def encoder_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_start_loc: torch.Tensor,
    relative_bias: torch.Tensor | None = None,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    max_query_len: int = 0,
) -> torch.Tensor:
    """As the declaration in core/ops/ragged.py says. Tokens behind the last request see each other."""
    num_tokens, num_heads, _ = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    group = num_heads // key.shape[1]
    keys, values = (x.to(wide).repeat_interleave(group, 1) for x in (key, value))
    places = torch.arange(num_tokens, device=query.device)
    owners = (places[:, None] >= query_start_loc[None, 1:]).sum(1)
    parts = []
    for start in range(0, num_tokens, QUERY_TILE):
        rows = slice(start, min(start + QUERY_TILE, num_tokens))
        scores = torch.einsum("qhd,khd->hqk", query[rows].to(wide), keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        distance = places[None, :] - places[rows, None]
        if relative_bias is not None:
            buckets = _distance_buckets(distance, relative_bias.shape[0])
            scores = scores + relative_bias[buckets].permute(2, 0, 1).to(wide)
        hidden = owners[None, :] != owners[rows, None]
        if window:
            hidden = hidden | (distance.abs() >= window)
        scores = scores.masked_fill(hidden, float("-inf"))
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(query.dtype))
    return torch.cat(parts) if parts else torch.empty_like(query)


def mean_rows(x: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """As the declaration in core/ops/ragged.py says."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = torch.arange(len(x), device=x.device)
    inside = (rows[None, :] >= starts[:, None]) & (rows[None, :] < ends[:, None])
    return ((inside.to(wide) @ x.to(wide)) / (ends - starts).clamp(min=1)[:, None]).to(x.dtype)


def store_rows(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """As the declaration in core/ops/ragged.py says: padding stores once more what another row stores, or, if there
    is none, what the first slot holds."""
    best = slots.argmax(0, keepdim=True)
    slot = slots[best].clamp(min=0)
    own = torch.where((slots[best] < 0)[:, None], cache[slot], rows[best].to(cache.dtype))
    padding = slots < 0
    kept = torch.where(padding[:, None], own, rows.to(cache.dtype))
    cache[torch.where(padding, slot, slots).long()] = kept
    return cache


def _distance_buckets(distances: torch.Tensor, num_buckets: int) -> torch.Tensor:
    half = num_buckets // 2
    exact = half // 2
    size = distances.abs()
    steps = torch.log(size.clamp(min=1).float() / exact) / math.log(128 / exact) * (half - exact)
    rows = torch.where(size < exact, size, (exact + steps.long()).clamp(max=half - 1))
    return rows + (distances > 0) * half
