"""Attention by intel-extension-for-pytorch, for models that the cpu platform runs in torch. Never a default.

Intel archived the project in March 2026 with a security notice; its last release, 2.8, works with torch 2.8 only. The
kernels are offered only if that pair is installed, and taken only for what they can compute and if they were faster
than ours a moment ago.
"""

import functools
import os
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from headrace.core.hooks import hookimpl
from headrace.core.ops import OpTable
from headrace.core.platform import DeviceInfo, OpContext, OpProvider
from headrace.core.stages import Array

DISTRIBUTION = "intel-extension-for-pytorch"
TORCH = "2.8."
"""The releases of torch that the last release of the extension works with."""
DTYPES = ("float32", "bfloat16")
ROUNDS = 5


@hookimpl
def headrace_op_providers(platform: str, device: DeviceInfo) -> Sequence[OpProvider]:
    """The extension's attention for the cpu platform, if it is installed."""
    if platform != "cpu":
        return ()
    try:
        version(DISTRIBUTION)
    except PackageNotFoundError:
        return ()
    ops: dict[str, Callable[..., Any]] = {
        "new_kv_cache": new_kv_cache,
        "write_kv": write_kv,
        "paged_attention": paged_attention,
    }
    return (OpProvider(name="ipex", priority=45, ops=ops, declines=_declines),)


def new_kv_cache(
    *, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: str, device: str
) -> Array:
    """(keys, values), each [num_blocks, num_kv_heads, block_size, head_dim]."""
    keys, values = OpTable.new_kv_cache(
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
    )
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    return keys.view(shape), values.view(shape)


def write_kv(kv_cache: Array, key: Array, value: Array, slot_mapping: Array) -> Array:
    """Store keys and values; a slot of -1 lands in the null block."""
    keys, values = kv_cache
    slots = slot_mapping.clamp(min=0)
    _kernels().reshape_and_cache(
        key.to(keys.dtype).contiguous(), value.to(values.dtype).contiguous(), keys, values, slots
    )
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
    softcap: float = 0.0,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    relative_bias: Array | None = None,
    causal: bool = True,
    max_query_len: int = 0,
    max_seq_len: int = 0,
) -> Array:
    """As the declaration in core/ops/attention.py says, without what `_declines` names."""
    import torch

    assert not window and not softcap and causal, "declined at selection"
    assert sinks is None and alibi_slopes is None and relative_bias is None, "declined at selection"
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if not len(query):
        return out
    keys, values = kv_cache
    ends = torch.zeros(len(seq_lens) + 1, dtype=torch.int32)
    torch.cumsum(seq_lens, 0, dtype=torch.int32, out=ends[1:])
    _kernels().flash_attn_varlen_func(
        out,
        query.contiguous(),
        keys,
        values,
        query_start_loc,
        ends,
        max_query_len or int(query_start_loc.diff().max()),
        max_seq_len or int(seq_lens.max()),
        scale,
        True,
        block_table.clamp(min=0).contiguous(),
        None,
    )
    return out


def _declines(op: str, context: OpContext) -> str:
    reason = _cannot_be_used() or _lacks(context)
    if reason:
        return reason
    attn = context.spec.layers[0].attn
    theirs, ours = _race(attn.num_heads, attn.num_kv_heads, attn.head_dim, context.block_size, context.dtype)
    return (
        "" if theirs < ours else f"slower here: {theirs * 1e6:.0f} us a decode of 8 requests, ours {ours * 1e6:.0f}"
    )


def _lacks(context: OpContext) -> str:
    """What a model asks of attention that these kernels are not used for; "" if nothing."""
    if context.dtype not in DTYPES:
        return f"its kernels are for {' and '.join(DTYPES)}, not {context.dtype}"
    if context.spec.kind != "decoder":
        return "its attention is causal"
    for attn in (layer.attn for layer in context.spec.layers):
        for name, asked in (
            ("sliding window", attn.window),
            ("chunks", attn.chunk),
            ("softcap", attn.softcap),
            ("sinks", attn.sinks),
            ("alibi", attn.alibi_max_bias),
        ):
            if asked:
                return f"not used for attention with {name}"
    return ""


@functools.cache
def _cannot_be_used() -> str:
    """Why the installed packages do not work together; "" if they do."""
    import torch

    if not torch.__version__.startswith(TORCH):
        return f"{DISTRIBUTION} {version(DISTRIBUTION)} works with torch {TORCH}*, not {torch.__version__}"
    try:
        _kernels()
    except (ImportError, AttributeError, OSError) as error:
        return f"it does not load: {error}"
    return ""


@functools.cache
def _kernels() -> Any:
    os.environ.setdefault("ONEDNN_VERBOSE", "0")
    return import_module("intel_extension_for_pytorch").llm.modules.PagedAttention


@functools.cache
def _race(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: str) -> tuple[float, float]:
    """Seconds of a decode of 8 requests of 1024 tokens: by the extension, and by what stands behind it."""
    import torch

    from .sdpa import paged_attention as ours

    requests, seq_len = 8, 1024
    width = -(-seq_len // block_size)
    narrow = getattr(torch, dtype)
    query = torch.randn(requests, num_heads, head_dim, dtype=narrow)
    table = torch.arange(1, requests * width + 1, dtype=torch.int32).view(requests, width)
    starts = torch.arange(requests + 1, dtype=torch.int32)
    lens = torch.full((requests,), seq_len, dtype=torch.int32)

    def best(make: Callable[..., Any], attend: Callable[..., Any]) -> float:
        cache = make(
            num_blocks=requests * width + 1,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device="cpu",
        )
        took = []
        for _ in range(ROUNDS):
            start_s = time.perf_counter()
            attend(query, cache, starts, lens, table, scale=head_dim**-0.5, max_query_len=1, max_seq_len=seq_len)
            took.append(time.perf_counter() - start_s)
        return min(took)

    with torch.inference_mode():
        return best(new_kv_cache, paged_attention), best(OpTable.new_kv_cache, ours)
