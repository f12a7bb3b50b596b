"""Pages of the KV cache that are asked of the system ahead of their use, while no step runs.

A cache takes memory as it is written, so a model with room for many requests starts at once and small loads stay
small. But the first write to a page waits for the system, and in a virtual machine for its host. So as much again as
was used so far is prefaulted between steps.
"""

import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from headrace.kernels.cpu import _ops

from ..memory import host_memory

FIRST_BYTES = 256 << 20
"""Ahead before anything was used, at most; less if one request cannot use it."""
MOST_BYTES = 1 << 30
"""Ahead of what was used, at most."""
SHARE_OF_FREE = 0.25
"""Of the memory that the system has left, at most."""


class KVPages:
    """Prefaults what steps will write to. Owns a thread, which sleeps unless something is wanted and no step runs."""

    def __init__(
        self,
        caches: Mapping[int, _ops.KVCache],
        block_size: int,
        request_tokens: int,
        free_bytes: Callable[[], int] = lambda: host_memory().free_bytes,
    ) -> None:
        """caches: one of the memory of each KV group, which are numbered. request_tokens: of the longest request.
        free_bytes: of the system."""
        self._groups = tuple(caches)
        self._caches = tuple(caches.values())
        self._block_size = block_size
        self._free_bytes = free_bytes
        most = FIRST_BYTES // len(caches)
        self._first = [min(most, self._extent(cache, request_tokens)) for cache in self._caches]
        self._all = [self._extent(cache, sys.maxsize) for cache in self._caches]
        self._used = [0] * len(caches)  # bytes
        self._wanted = [0] * len(caches)
        self._prefault = _ops.Prefault(self._caches)
        for region in range(len(caches)):
            self._want(region)

    def hold(self) -> None:
        """A step begins."""
        self._prefault.hold()

    def used(self, slot_mappings: Sequence[npt.NDArray[np.int32]]) -> None:
        """A step has written to these slots, [num_tokens] of each KV group; it may be that more is wanted now."""
        self._prefault.rest()
        for region, group in enumerate(self._groups):
            used = self._extent(self._caches[region], int(slot_mappings[group].max(initial=-1)) + 1)
            if used > self._used[region]:
                self._used[region] = used
                if self._wanted[region] - used < self._ahead(region) // 2:
                    self._want(region)

    def _ahead(self, region: int) -> int:
        return min(max(self._used[region], self._first[region]), MOST_BYTES // len(self._caches))

    def _want(self, region: int) -> None:
        ahead = min(self._ahead(region), int(self._free_bytes() * SHARE_OF_FREE))
        self._wanted[region] = min(self._used[region] + ahead, self._all[region])
        self._prefault.want(region, self._wanted[region])

    def _extent(self, cache: _ops.KVCache, num_tokens: int) -> int:
        return cache.extent(-(-num_tokens // self._block_size))
