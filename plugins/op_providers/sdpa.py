"""Attention through torch's fused scaled_dot_product_attention; paged, all decoding requests in one call.

For the cpu platform, whose definition loops over requests; on GPUs for encoders, whose kernels are flash attention.
Declines what the fused kernel has no argument for.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.core.hooks import hookimpl
from headrace.core.ops import OpTable
from headrace.core.ops.attention import first_seen
from headrace.core.platform import DeviceInfo, OpContext, OpProvider
from headrace.core.stages import Array

if TYPE_CHECKING:
    import torch

PLATFORMS = ("cpu",)
GPUS = ("cuda", "rocm", "xpu")


@hookimpl
def headrace_op_providers(platform: str, device: DeviceInfo) -> Sequence[OpProvider]:
    """The fused attention for platforms whose arrays are torch tensors."""
    if platform in GPUS:
        ops = {"encoder_attention": encoder_attention}
        return (OpProvider(name="torch-sdpa", priority=40, ops=ops, declines=_declines),)
    if platform not in PLATFORMS:
        return ()
    return (
        OpProvider(
            name="torch-sdpa",
            priority=40,
            ops={
                "new_kv_cache": OpTable.new_kv_cache,
                "write_kv": OpTable.write_kv,
                "paged_attention": paged_attention,
                "encoder_attention": encoder_attention,
            },
            declines=_declines,
        ),
    )


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
    """As the declaration in core/ops says; softcap, sinks, biases by distance and sight ahead, which the fused kernel
    lacks, go to the definition.

    Requests with one token are padded to the longest and computed together; others one by one.
    """
    import torch

    if softcap or sinks is not None or relative_bias is not None or reach is not None:
        return OpTable.paged_attention(
            query,
            kv_cache,
            query_start_loc,
            seq_lens,
            block_table,
            scale=scale,
            window=window,
            chunk=chunk,
            softcap=softcap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            relative_bias=relative_bias,
            reach=reach,
            causal=causal,
        )
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    counts = [end - start for start, end in zip(starts, starts[1:], strict=False)]
    out = torch.empty_like(query)
    decodes = [r for r, count in enumerate(counts) if count == 1]
    for r, count in enumerate(counts):
        if count > 1 or (count == 1 and len(decodes) == 1):
            rows = slice(starts[r], starts[r + 1])
            attended = _attend(
                query[rows][None],
                kv_cache,
                [lens[r]],
                block_table[r : r + 1],
                scale,
                window,
                chunk,
                alibi_slopes,
                causal,
            )
            out[rows] = attended[0]
    if len(decodes) > 1:
        picked = torch.tensor(decodes, device=query.device)
        tokens = torch.tensor([starts[r] for r in decodes], device=query.device)
        attended = _attend(
            query[tokens][:, None],
            kv_cache,
            [lens[r] for r in decodes],
            block_table[picked],
            scale,
            window,
            chunk,
            alibi_slopes,
            causal,
        )
        out[tokens] = attended[:, 0]
    return out


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
    """As the declaration in core/ops says, one request after another; softcap and bias by distance, which the fused
    kernel lacks, go to the definition."""
    from headrace.kernels.torch import fused

    if softcap or relative_bias is not None:
        arrays = (query, key, value, query_start_loc, relative_bias)
        return OpTable.encoder_attention(*arrays, scale=scale, window=window, softcap=softcap)
    return fused.encoder_attention(query, key, value, query_start_loc, scale=scale, window=window)


def _attend(
    query: "torch.Tensor",
    kv_cache: "tuple[torch.Tensor, torch.Tensor]",
    lens: Sequence[int],
    block_table: "torch.Tensor",
    scale: float,
    window: int,
    chunk: int,
    alibi_slopes: "torch.Tensor | None",
    causal: bool,
) -> "torch.Tensor":
    """query: [num_reqs, query_len, num_heads, head_dim], the last positions of each request. Returns its shape."""
    import torch

    keys, values = kv_cache
    block_size, query_len, longest = keys.shape[1], query.shape[1], max(lens)
    blocks = block_table[:, : -(-longest // block_size)].long().clamp(min=0)
    k = keys[blocks].flatten(1, 2)[:, :longest].transpose(1, 2)
    v = values[blocks].flatten(1, 2)[:, :longest].transpose(1, 2)
    seq_lens = torch.tensor(lens, device=query.device)[:, None, None]
    q_pos = seq_lens - query_len + torch.arange(query_len, device=query.device)[None, :, None]
    k_pos = torch.arange(longest, device=query.device)[None, None, :]
    seen = k_pos <= (q_pos if causal else seq_lens - 1).expand_as(q_pos)
    if window or chunk:
        seen = seen & (k_pos >= first_seen(q_pos, window, chunk))
        # Blocks before what is seen may hold anything, NaN too, and 0 * NaN is NaN.
        first = first_seen(q_pos.amin(1, keepdim=True), window, chunk)
        alive = (k_pos >= first)[:, 0, None, :, None] & (k_pos < seq_lens)[:, 0, None, :, None]
    else:
        alive = (k_pos < seq_lens)[:, 0, None, :, None]
    if window or chunk or min(lens) < longest:
        k, v = k.masked_fill(~alive, 0), v.masked_fill(~alive, 0)
    mask, dtype = seen[:, None], query.dtype
    if alibi_slopes is not None:
        # A bias has the dtype of the query, and distances need more digits than bfloat16 has.
        dtype = torch.promote_types(query.dtype, torch.float32)
        bias = alibi_slopes.to(dtype)[None, :, None, None] * (k_pos - q_pos)[:, None]
        mask = bias.masked_fill(~mask, float("-inf"))
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2).to(dtype), k.to(dtype), v.to(dtype), attn_mask=mask, scale=scale, enable_gqa=True
    )
    return attended.transpose(1, 2)


def _declines(op: str, context: OpContext) -> str:
    if any(layer.attn.softcap for layer in context.spec.layers):
        return "the fused kernel has no softcap"
    if op == "encoder_attention" and context.spec.num_relative_buckets:
        return "the fused kernel has no bias by distance"
    return ""
