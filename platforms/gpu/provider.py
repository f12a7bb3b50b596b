"""Triton's kernels as an op provider, beside the definitions that they share a memory layout with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.core.config import KV_DTYPES
from headrace.core.ops import OpTable
from headrace.core.ops.attention import distance_buckets
from headrace.core.ops.sampling import keep_tokens
from headrace.core.platform import OpProvider
from headrace.core.stages import Array

from .packing import pack_linear, pack_stacked

if TYPE_CHECKING:
    from headrace.kernels.triton.ops import TritonOps

Libraries = Callable[[OpProvider, "TritonOps", str], Sequence[OpProvider]]
"""(Triton's provider, its kernels, architecture) -> providers of a vendor's libraries, which may share layouts."""


def gpu_providers(
    arch: str, *, torch_device: str, interpreted: bool, libraries: Libraries | None = None
) -> tuple[Sequence[OpProvider], Mapping[str, str]]:
    """The providers for an architecture, and what the start log says of them. Imports triton.

    interpreted: by Triton's interpreter on this processor, where no library stands beside it.
    """
    from headrace.kernels.triton.ops import TritonOps
    from headrace.kernels.triton.tuning import INTERPRETED_VALUES, tuning_for

    from .prompts import prompts_provider

    tuning = tuning_for(arch)
    if interpreted:
        tuning = replace(tuning, interpreted_values=INTERPRETED_VALUES)
    kernels = TritonOps(tuning, wide_dot=interpreted)
    ops: dict[str, Any] = {
        **kernels.table(),
        "new_kv_cache": OpTable.new_kv_cache,
        "pack_linear": partial(pack_linear, float8=tuning.float8),
        "linear": _Linear(kernels),
        "pack_stacked": partial(pack_stacked, float8=tuning.float8),
        "absorb_keys": _Heads(OpTable.absorb_keys, kernels.absorb_keys),
        "expand_values": _Heads(OpTable.expand_values, kernels.expand_values),
        "paged_attention": _Attention(kernels),
        "new_state": OpTable.new_state,
        "sample": _Sample(kernels),
    }
    about = {"tuning": tuning.name, "kernels": "Triton, interpreted" if interpreted else "Triton"}
    triton = OpProvider(name="triton", ops=ops, kv_dtypes=KV_DTYPES)
    others: list[OpProvider] = []
    if not interpreted:
        others += [prompts_provider(triton, torch_device), *(libraries(triton, kernels, arch) if libraries else ())]
        about["libraries"] = " ".join(provider.name for provider in others)
    return (triton, *others), about


class _Linear:
    """`linear`: a kernel for weights in integers, the vendor's matrix library for dense ones."""

    def __init__(self, kernels: "TritonOps") -> None:
        self._kernels = kernels

    def __call__(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        import torch

        if isinstance(weight, torch.Tensor):
            return OpTable.linear(x, weight, bias)
        return self._kernels.quantized_linear(x, weight, bias)


class _Heads:
    """A product with the heads of latent attention: a kernel for weights in codes, torch's for dense ones."""

    def __init__(self, dense: Callable[..., Array], quantized: Callable[..., Array]) -> None:
        self._dense, self._quantized = dense, quantized

    def __call__(self, x: Array, weight: Array, **options: Any) -> Array:
        import torch

        serve = self._dense if isinstance(weight, torch.Tensor) else self._quantized
        return serve(x, weight, **options)


class _Attention:
    """`paged_attention`: what the kernel has no argument for becomes what it has, or runs in torch's operations."""

    def __init__(self, kernels: "TritonOps") -> None:
        self._kernels = kernels

    def __call__(
        self,
        query: Array,
        kv_cache: Array,
        query_start_loc: Array,
        seq_lens: Array,
        block_table: Array,
        *,
        relative_bias: Array | None = None,
        reach: Array | None = None,
        causal: bool = True,
        max_query_len: int = 0,
        **options: Any,
    ) -> Array:
        batch = (query_start_loc, seq_lens, block_table)
        if relative_bias is not None:
            from headrace.kernels.torch.attention import paged_attention

            options |= {
                "relative_bias": relative_bias,
                "reach": reach,
                "causal": causal,
                "max_query_len": max_query_len,
            }
            return paged_attention(query, kv_cache, *batch, buckets=distance_buckets, **options)
        if not causal and max_query_len != 1:  # the last token of a request sees all of it: make each the last of one
            batch, max_query_len = single_tokens(len(query), *batch), 1
        return self._kernels.paged_attention(
            query, kv_cache, *batch, reach=reach, max_query_len=max_query_len, **options
        )


def single_tokens(
    num_tokens: int, query_start_loc: Array, seq_lens: Array, block_table: Array
) -> tuple[Array, Array, Array]:
    """The batch with a request of its own for each token, which sees all of the cache that its request has."""
    import torch

    places = torch.arange(num_tokens + 1, dtype=query_start_loc.dtype, device=query_start_loc.device)
    owners = torch.searchsorted(query_start_loc[1:], places[:-1], right=True).clamp(max=len(seq_lens) - 1)
    return places, seq_lens[owners], block_table[owners]


class _Sample:
    """`sample`: what is kept is decided by the definition's sort, the noise and the maximum by a kernel."""

    def __init__(self, kernels: "TritonOps") -> None:
        self._kernels = kernels

    def __call__(
        self,
        logits: Array,
        seeds: Array,
        positions: Array,
        temperature: Array | None,
        top_k: Array | None,
        top_p: Array | None,
        min_p: Array | None,
    ) -> Array:
        if temperature is None:
            return self._kernels.pick_tokens(logits)
        if top_k is not None or top_p is not None or min_p is not None:
            # The best token is always kept, so greedy rows lose nothing.
            warm = temperature.clamp(min=1e-5)[:, None]
            kept = keep_tokens(logits / warm, top_k, top_p, min_p)
            logits = logits.masked_fill(kept == float("-inf"), float("-inf"))
        return self._kernels.pick_tokens(logits, seeds, positions, temperature)
