"""Ops over the rows of whole requests in one step: attention in both directions, means of rows; and rows that are
kept for later steps."""

from ..stages import Array
from .attention import distance_buckets


def encoder_attention(
    query: Array,
    key: Array,
    value: Array,
    query_start_loc: Array,
    relative_bias: Array | None = None,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    max_query_len: int = 0,
) -> Array:
    """Attention of a ragged batch in which every token of a request sees all of its tokens.

    query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim]; request r owns rows
    query_start_loc[r] : query_start_loc[r + 1] of all three. Query head h reads KV head
    h // (num_heads / num_kv_heads). window: a token sees itself and window - 1 tokens on either side, 0 sees all.
    softcap: scores become softcap * tanh(scores / softcap). relative_bias: float32 [num_buckets, num_heads], added to
    the scores by distance; buckets are T5's (Raffel et al. 2020): the second half is for keys after the query; of
    each half, one half is for single distances, the rest for those up to 128 in logarithmic steps. max_query_len:
    an upper bound, 0 if unknown.
    Scores, softmax and sums in float32 at least. A request without tokens is allowed.
    Returns [num_tokens, num_heads, head_dim] in query's dtype.
    """
    import torch

    group = query.shape[1] // key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    out = torch.empty_like(query)
    starts = query_start_loc.tolist()
    for begin, end in zip(starts, starts[1:], strict=False):
        if begin == end:
            continue
        k = key[begin:end].to(wide).repeat_interleave(group, 1)
        v = value[begin:end].to(wide).repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query[begin:end].to(wide), k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        place = torch.arange(end - begin, device=query.device)
        if relative_bias is not None:
            distances, half = place[None, :] - place[:, None], relative_bias.shape[0] // 2
            rows = distance_buckets(distances.abs(), half) + (distances > 0) * half
            scores = scores + relative_bias[rows].permute(2, 0, 1).to(wide)
        if window:
            scores = scores.masked_fill((place[:, None] - place[None, :]).abs() >= window, float("-inf"))
        out[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(out.dtype)
    return out


def mean_rows(x: Array, starts: Array, ends: Array) -> Array:
    """Means of ranges of rows: row i is the mean of x[starts[i] : ends[i]], which is not empty.

    x: [num_tokens, n]; starts, ends: int32 [m]. Returns [m, n] in x's dtype. Sums in float32 at least.
    """
    import torch

    wide = torch.promote_types(x.dtype, torch.float32)
    means = [x[start:end].to(wide).mean(0) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    return torch.stack(means).to(x.dtype)


def stack_rows(x: Array, indices: Array) -> Array:
    """Windows of rows, side by side: row i is x[indices[i, 0]], x[indices[i, 1]], ...; an index of -1 is zeros.

    x: [n, m]; indices: int32 [rows, k]. Returns [rows, k * m] in x's dtype. With a linear layer behind it, this is a
    convolution.
    """
    import torch

    padded = torch.cat([x, x.new_zeros((1, x.shape[1]))])
    return padded[indices.long()].flatten(1)


def store_rows(cache: Array, rows: Array, slots: Array) -> Array:
    """cache[slots[i]] = rows[i]; mutates cache and returns it (or its successor).

    cache: [num_slots, n]; rows: [m, n]; slots: int32 [m], a slot of -1 is padding and lands nowhere.
    """
    kept = slots >= 0
    cache[slots[kept].long()] = rows[kept].to(cache.dtype)
    return cache


def place_rows(x: Array, rows: Array, indices: Array, *, add: bool = False) -> Array:
    """x with row i replaced by rows[indices[i]], or grown by it (add); an index of -1 leaves it.

    x: [m, n]; rows: [k, n]; indices: int32 [m]. Returns [m, n] in x's dtype.
    """
    import torch

    picked = rows[indices.long().clamp(min=0)].to(x.dtype)
    return torch.where((indices >= 0)[:, None], x + picked if add else picked, x)
