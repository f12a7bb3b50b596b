"""Paged attention (Kwon et al. 2023). One family: the ops share the layout of the KV cache."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..stages import Array

if TYPE_CHECKING:
    import torch

MAX_DISTANCE = 128
"""Tokens this far apart or further share the last row of a bias by distance."""


def new_kv_cache(
    *, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: str, device: str
) -> Array:
    """The KV cache of one layer, zeroed: an opaque object for `write_kv` and `paged_attention`.

    dtype: that of activations, or "int8": integers with a float32 scale for each token and head. The definition
    holds (keys, values), each [num_blocks, block_size, num_kv_heads, head_dim] or `Integers` of that shape.
    """
    from ._torch import zeros

    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    if dtype == "int8":
        keys, values = (
            Integers(codes=zeros(shape, "int8", device), scales=zeros(shape[:-1], "float32", device))
            for _ in range(2)
        )
        return keys, values
    return zeros(shape, dtype, device), zeros(shape, dtype, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Integers:
    """Keys or values of a cache of integers: codes times scales.

    codes: int8 [num_blocks, block_size, num_kv_heads, head_dim]. scales: float32, one for each head_dim codes.

    A vector of head_dim has the scale max|x| / 127 and the codes x * (127 / max|x|), computed in float32 and rounded
    to nearest even. One that holds a NaN or an infinity has the scale NaN.
    """

    codes: "torch.Tensor"
    scales: "torch.Tensor"

    @property
    def shape(self) -> "torch.Size":
        """Of the codes."""
        return self.codes.shape

    def write(self, at: tuple["torch.Tensor", "torch.Tensor"], x: "torch.Tensor") -> None:
        """Store x, [num_tokens, num_kv_heads, head_dim]. at: blocks and offsets, [num_tokens] each."""
        import torch

        x = x.float()
        top = x.abs().amax(-1)
        inverse = torch.where(top > 0, 127 / top, 0.0)
        codes = torch.round(x * inverse[..., None]).nan_to_num(0.0)
        self.codes[at] = codes.to(torch.int8)
        self.scales[at] = torch.where(top.isfinite(), top / 127, math.nan)

    def __getitem__(self, blocks: "torch.Tensor") -> "torch.Tensor":
        """What the codes of some blocks stand for, float32."""
        return self.codes[blocks] * self.scales[blocks][..., None]


def write_kv(kv_cache: Array, key: Array, value: Array, slot_mapping: Array) -> Array:
    """Store this step's keys and values; mutates kv_cache and returns it (or its successor).

    key, value: [num_tokens, num_kv_heads, head_dim]; slot_mapping: int32 [num_tokens], slot = block_id *
    block_size + offset; a slot of -1 is padding and lands in the null block 0 or nowhere.
    """
    slots, block_size = slot_mapping.long().clamp(min=0), kv_cache[0].shape[1]
    at = slots // block_size, slots % block_size  # no view is written to, which some recorders of steps cannot hold
    for stored, new in zip(kv_cache, (key, value), strict=True):
        if isinstance(stored, Integers):
            stored.write(at, new)
        else:
            stored[at] = new.to(stored.dtype)
    return kv_cache


def paged_attention(
    query: Array,
    kv_cache: Array,
    query_start_loc: Array,
    seq_lens: Array,
    block_table: Array,
    *,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    relative_bias: Array | None = None,
    reach: Array | None = None,
    causal: bool = True,
    max_query_len: int = 0,
    max_seq_len: int = 0,
) -> Array:
    """Attention of a ragged batch over the paged cache.

    query: [num_tokens, num_heads, head_dim]; request r owns rows query_start_loc[r] : query_start_loc[r + 1],
    which are its last positions before seq_lens[r]. block_table: int32 [num_reqs, max_num_blocks], -1 padded;
    position p lies in block block_table[r, p // block_size]. Query head h reads KV head
    h // (num_heads / num_kv_heads). window: a token sees itself and window - 1 tokens before it, 0 sees all;
    chunk: a token sees none before the last multiple of this up to its own position (and no window is given).
    Entries of the table before what is seen may be stale and are not read. softcap: scores become
    softcap * tanh(scores / softcap). sinks: float32 [num_heads], one more logit in each softmax's sum.
    alibi_slopes: float32 [num_heads], adds slope * (key position - query position). relative_bias: float32
    [num_buckets, num_heads], added by distance; T5's buckets for keys that are not after the query (Raffel et al.
    2020): half of them for single distances, the rest for those up to 128 in logarithmic steps. causal: a token sees
    positions up to its own; False: all seq_lens[r] of its request, however many its rows (then no window). reach:
    int32 [num_tokens], a token also sees the positions behind its own that are less than this.
    Scores, softmax and sums in float32 at least. A request without tokens is allowed.
    Returns [num_tokens, num_heads, head_dim] in query's dtype.
    """
    import torch

    keys, values = kv_cache
    block_size = keys.shape[1]
    num_heads, group = query.shape[1], query.shape[1] // keys.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    out = torch.empty_like(query)
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    for r in range(len(lens)):
        begin, end, seq_len = starts[r], starts[r + 1], lens[r]
        if begin == end:
            continue
        first_query = seq_len - (end - begin)
        first_block = max(0, first_seen(first_query, window, chunk)) // block_size
        first_key = first_block * block_size
        blocks = block_table[r, first_block : -(-seq_len // block_size)].long()
        num_keys = seq_len - first_key
        k = keys[blocks].flatten(0, 1)[:num_keys].to(wide).repeat_interleave(group, 1)
        v = values[blocks].flatten(0, 1)[:num_keys].to(wide).repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query[begin:end].to(wide), k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        q_pos = torch.arange(first_query, seq_len, device=query.device)[:, None]
        k_pos = torch.arange(first_key, seq_len, device=query.device)[None, :]
        if alibi_slopes is not None:
            scores = scores + alibi_slopes.to(wide)[:, None, None] * (k_pos - q_pos)
        if relative_bias is not None:
            rows = distance_buckets(q_pos - k_pos, relative_bias.shape[0])
            scores = scores + relative_bias[rows].permute(2, 0, 1).to(wide)
        hidden = (k_pos > q_pos) & causal
        if reach is not None:
            hidden = hidden & (k_pos >= reach[begin:end, None])
        hidden = hidden | (k_pos < first_seen(q_pos, window, chunk))
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            extra = sinks.to(wide)[:, None, None].expand(num_heads, end - begin, 1)
            scores = torch.cat([scores, extra], -1)
        weights = scores.softmax(-1)[..., :num_keys]
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)
    return out


def first_seen(positions: Array, window: int, chunk: int) -> Array:
    """The first positions that tokens at these, a number or an array, see; below 0 is 0; not an op."""
    if chunk:
        return positions - positions % chunk
    return positions - window + 1 if window else positions * 0


def distance_buckets(distances: "torch.Tensor", num_buckets: int) -> "torch.Tensor":
    """Rows of a bias by distance for distances of any sign, of which those below 0 count as 0; not an op."""
    import torch

    exact, size = num_buckets // 2, distances.clamp(min=0)
    steps = torch.log(size.clamp(min=1).float() / exact) / math.log(MAX_DISTANCE / exact) * (num_buckets - exact)
    return torch.where(size < exact, size, (exact + steps.long()).clamp(max=num_buckets - 1))
