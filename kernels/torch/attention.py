"""Paged attention in plain torch operations of static shapes, without reading one value on the host.

The ragged batch is cut into tiles of queries of one request each. How many tiles there are follows from the shapes
alone (an upper bound), and which request a tile serves is computed on the device.
"""

from collections.abc import Callable

import torch

QUERY_TILE = 64
"""Queries of a request that are computed together."""
KEY_CHUNK = 512
"""Keys that are gathered at a time; longer sequences go through an online softmax (Milakov and Gimelshein 2018)."""


def paged_attention(
    query: torch.Tensor,
    kv_cache: tuple[torch.Tensor, torch.Tensor],
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    relative_bias: torch.Tensor | None = None,
    reach: torch.Tensor | None = None,
    causal: bool = True,
    max_query_len: int = 0,
    max_seq_len: int = 0,
    buckets: Callable[[torch.Tensor, int], torch.Tensor],
) -> torch.Tensor:
    """As the declaration in core/ops/attention.py says.

    query: [num_tokens, num_heads, head_dim]; kv_cache: keys and values, each [num_blocks, block_size, num_kv_heads,
    head_dim]. Tables as wide as max_seq_len needs; max_query_len of 0 counts as num_tokens. buckets:
    (distances, number of rows) -> rows of relative_bias.
    """
    keys, values = kv_cache
    block_size, num_kv_heads = keys.shape[1], keys.shape[2]
    num_tokens, num_heads, head_dim = query.shape
    num_reqs, device = len(seq_lens), query.device
    if not num_tokens or not num_reqs:
        return torch.empty_like(query)
    wide = torch.promote_types(query.dtype, torch.float32)
    tile = min(QUERY_TILE, max_query_len or num_tokens)
    num_tiles = num_reqs if tile == 1 else num_tokens // tile + num_reqs

    # Request r owns the tiles from starts[r] // tile + r on, or tile r if each request has at most one token.
    starts, counts = query_start_loc[:-1].long(), query_start_loc.diff().long()
    tiles = torch.arange(num_tiles, device=device)
    firsts = torch.arange(num_reqs, device=device) + (0 if tile == 1 else starts // tile)
    request = (tiles[:, None] >= firsts[None, :]).sum(1) - 1
    row = (tiles - firsts[request])[:, None] * tile + torch.arange(tile, device=device)  # [num_tiles, tile]
    token = (starts[request][:, None] + row).clamp(max=num_tokens - 1)
    lens = seq_lens.long()[request]
    q_pos = (lens - counts[request])[:, None] + row
    starts_of_chunks = q_pos - q_pos % chunk if chunk else q_pos

    q = query[token].to(wide).view(num_tiles, tile, num_kv_heads, -1, head_dim) * scale
    shape = (num_tiles, num_kv_heads, num_heads // num_kv_heads, tile)
    if sinks is None:
        top = torch.full(shape, float("-inf"), dtype=wide, device=device)
        total = torch.zeros(shape, dtype=wide, device=device)
    else:
        top = sinks.to(wide).view(1, num_kv_heads, -1, 1).expand(shape)
        total = torch.ones(shape, dtype=wide, device=device)
    out = torch.zeros((*shape, head_dim), dtype=wide, device=device)
    slopes = None if alibi_slopes is None else alibi_slopes.to(wide).view(1, num_kv_heads, -1, 1, 1)

    table = block_table.long().clamp(min=0)
    chunk_blocks = max(1, KEY_CHUNK // block_size)
    width = min(table.shape[1], -(-max_seq_len // block_size)) if max_seq_len else table.shape[1]
    for first_block in range(0, width, chunk_blocks):
        blocks = table[:, first_block : min(first_block + chunk_blocks, width)][request]
        k_pos = first_block * block_size + torch.arange(blocks.shape[1] * block_size, device=device)
        # Slots outside of what a tile may see hold anything, NaN too, and 0 * NaN is NaN.
        alive = k_pos < lens[:, None]
        if window:
            alive = alive & (k_pos > q_pos[:, :1] - window)
        if chunk:
            alive = alive & (k_pos >= starts_of_chunks[:, :1])
        k = keys[blocks].flatten(1, 2).to(wide).masked_fill(~alive[:, :, None, None], 0)
        v = values[blocks].flatten(1, 2).to(wide).masked_fill(~alive[:, :, None, None], 0)
        scores = torch.einsum("tqhgd,tkhd->thgqk", q, k)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        distance = (k_pos - q_pos[:, :, None])[:, None, None]
        if slopes is not None:
            scores = scores + slopes * distance
        if relative_bias is not None:
            rows = buckets(q_pos[:, :, None] - k_pos, len(relative_bias))
            scores = scores + relative_bias.to(wide)[rows].permute(0, 3, 1, 2).view(scores.shape)
        ahead = (distance > 0) & causal
        if reach is not None:
            ahead = ahead & (k_pos >= reach[token][:, :, None])[:, None, None]
        hidden = ahead | ~alive[:, None, None, None, :]
        if window:
            hidden = hidden | (distance <= -window)
        if chunk:
            hidden = hidden | (k_pos < starts_of_chunks[:, :, None])[:, None, None]
        scores = scores.masked_fill(hidden, float("-inf"))
        highest = torch.maximum(top, scores.amax(-1))
        base = highest.masked_fill(highest == float("-inf"), 0)
        weights = torch.exp(scores - base[..., None])
        shrink = torch.exp(top - base)
        total = total * shrink + weights.sum(-1)
        out = out * shrink[..., None] + torch.einsum("thgqk,tkhd->thgqd", weights, v)
        top = highest
    out = out / total.masked_fill(total == 0, 1)[..., None]

    # Back to the ragged rows: each token knows its request, so its tile and its row in it.
    tokens = torch.arange(num_tokens, device=device)
    owner = (tokens[:, None] >= query_start_loc[None, 1:]).sum(1).clamp(max=num_reqs - 1)
    offset = tokens - starts[owner]
    # Tokens behind the last request (padding of the batch) take any tile.
    place = (firsts[owner] + offset // tile).clamp(max=num_tiles - 1)
    picked = out.permute(0, 3, 1, 2, 4).flatten(2, 3)[place, offset % tile]
    return picked.to(query.dtype)
