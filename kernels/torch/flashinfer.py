"""Attention over pages by flashinfer, for steps that are not recorded: prompts, chunks and verified drafts.

A step is planned once, on the host, for all layers of one window, and each layer runs by that plan. A recorded step
cannot be planned anew, so decodes, which are replayed, stay with Triton's kernels.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from .beside import Asked, Attend, Batch, Beside

WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What attention of one kind of layer is planned with."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    scale: float
    window: int
    softcap: float
    causal: bool


class FlashInfer(Beside):
    """Steps that are not recorded. Owns a workspace and, for each kind of layer, a wrapper with the plan of the last
    step that it saw."""

    def __init__(self, others: Attend) -> None:
        super().__init__(others)
        self._workspace: torch.Tensor | None = None
        self._wrappers: dict[_Kind, Any] = {}
        self._planned: dict[_Kind, Batch] = {}

    def attend(self, query: torch.Tensor, kv_cache: Any, batch: Batch, asked: Asked) -> torch.Tensor | None:
        """All but decodes."""
        if asked.max_query_len == 1:
            return None
        keys, _ = kv_cache
        kind = _Kind(
            num_heads=query.shape[1],
            num_kv_heads=keys.shape[2],
            head_dim=query.shape[2],
            block_size=keys.shape[1],
            dtype=query.dtype,
            scale=asked.scale,
            window=asked.window,
            softcap=asked.softcap,
            causal=asked.causal,
        )
        attended: torch.Tensor = self._wrapper(kind, batch).run(query.contiguous(), kv_cache)
        return attended

    def _wrapper(self, kind: _Kind, batch: Batch) -> Any:
        """The wrapper of a kind of layer, planned for this step: its arrays are the same for all its layers."""
        if kind not in self._wrappers:
            if self._workspace is None:
                self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=batch[0].device)
            library = import_module("flashinfer")
            self._wrappers[kind] = library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
        wrapper, known = self._wrappers[kind], self._planned.get(kind)
        if known is not None and all(old is new for old, new in zip(known, batch, strict=True)):
            return wrapper
        starts, indptr, indices, last_lens = pages(*batch, block_size=kind.block_size)
        wrapper.plan(
            starts,
            indptr,
            indices,
            last_lens,
            kind.num_heads,
            kind.num_kv_heads,
            kind.head_dim,
            kind.block_size,
            causal=kind.causal,
            sm_scale=kind.scale,
            window_left=kind.window - 1,
            logits_soft_cap=kind.softcap or None,
            q_data_type=kind.dtype,
            kv_data_type=kind.dtype,
        )
        self._planned[kind] = batch
        return wrapper


def pages(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, *, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(query_start_loc, where each request's pages begin, the pages, tokens in the last of each) on the host, int32.

    Waits for the device once.
    """
    num_reqs, width = block_table.shape
    words = torch.cat([query_start_loc, seq_lens, block_table.flatten()]).cpu()
    starts, lens = words[: num_reqs + 1], words[num_reqs + 1 : 2 * num_reqs + 1]
    table = words[2 * num_reqs + 1 :].view(num_reqs, width)
    counts = (lens + block_size - 1) // block_size
    indptr = torch.zeros(num_reqs + 1, dtype=torch.int32)
    torch.cumsum(counts, 0, dtype=torch.int32, out=indptr[1:])
    is_used = torch.arange(width)[None, :] < counts[:, None]
    indices = table[is_used].clamp(min=0)
    return starts, indptr, indices, lens - (counts - 1).clamp(min=0) * block_size
