"""How far ahead of its use the memory of a KV cache is asked for."""

import time

import numpy as np
import numpy.typing as npt
import pytest

from headrace.kernels.cpu import _ops
from headrace.platforms.cpu.native import kv_pages
from headrace.platforms.cpu.native.kv_pages import KVPages

MIB = 1 << 20
BLOCK_BYTES = 16 << 10  # of 16 tokens


def caches(*mib: int) -> dict[int, _ops.KVCache]:
    return {n: _ops.kv_caches(size * 64, 16, [(4, 64)], "bfloat16")[0] for n, size in enumerate(mib)}


def slots(last: int) -> "list[npt.NDArray[np.int32]]":
    return [np.array([-1, last - 1, last], np.int32)]


def settled(pages: KVPages, region: int = 0) -> int:
    """Bytes that are there once nothing more is wanted."""
    deadline = time.monotonic() + 600  # the thread runs only while a core is idle
    while pages._prefault.done(region) != pages._wanted[region]:
        assert time.monotonic() < deadline, "pages did not come"
        time.sleep(0.02)
    return pages._prefault.done(region)


def test_first_what_one_request_can_use() -> None:
    assert settled(KVPages(caches(512), 16, request_tokens=16 * 640)) == 10 * MIB
    assert settled(KVPages(caches(512), 16, request_tokens=1 << 20)) == kv_pages.FIRST_BYTES


def test_then_as_much_again_as_was_used() -> None:
    pages = KVPages(caches(512), 16, request_tokens=16 * 640)
    pages.used(slots(16 * 64 * 2 - 1))  # 2 MiB
    assert settled(pages) == 10 * MIB, "there is enough ahead"
    pages.used(slots(16 * 64 * 40 - 1))
    assert settled(pages) == 80 * MIB
    pages.used(slots(16 * 64 * 30 - 1))  # blocks that were used before
    assert settled(pages) == 80 * MIB
    pages.used(slots(16 * 64 * 400 - 1))
    assert settled(pages) == 512 * MIB, "all there is"


def test_no_more_than_a_share_of_the_memory_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 64 * MIB
    pages = KVPages(caches(512), 16, request_tokens=1 << 20, free_bytes=lambda: free)
    assert settled(pages) == 16 * MIB
    free = 0
    pages.used(slots(16 * 64 * 20 - 1))
    assert pages._wanted == [20 * MIB], "nothing ahead"
    monkeypatch.setattr(kv_pages, "MOST_BYTES", 32 * MIB)
    free = 1 << 40
    pages.used(slots(16 * 64 * 100 - 1))
    assert settled(pages) == 132 * MIB


def test_groups_share_what_is_taken_ahead() -> None:
    pages = KVPages(caches(256, 256), 16, request_tokens=1 << 20)
    assert [settled(pages, region) for region in (0, 1)] == [kv_pages.FIRST_BYTES // 2] * 2


def test_slots_of_padding_use_nothing() -> None:
    pages = KVPages(caches(64), 16, request_tokens=16)
    before = settled(pages)
    pages.used([np.full(3, -1, np.int32)])
    pages.used([np.empty(0, np.int32)])
    assert settled(pages) == before == 8 * BLOCK_BYTES
