"""Pages of caches that are taken ahead: those that are wanted, while nobody computes, and nothing in them changes."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace.kernels.cpu import _ops as ops

MIB = 1 << 20


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600  # the thread runs only while a core is idle
    while not condition():
        assert time.monotonic() < deadline, "pages did not come"
        time.sleep(0.01)


def cache_of(mib: int) -> ops.KVCache:
    """One layer of blocks of 16 KiB."""
    return ops.kv_caches(mib * 64, 16, [(4, 64)], "bfloat16")[0]


def test_the_pages_that_are_wanted_come_and_no_more() -> None:
    cache, other = cache_of(256), cache_of(256)
    before = resident()
    prefault = ops.Prefault([cache, other])
    prefault.want(1, 64 * MIB)
    wait_until(lambda: prefault.done(1) >= 64 * MIB)
    assert prefault.done(0) == 0
    assert 60 * MIB < resident() - before < 90 * MIB
    prefault.want(1, 32 * MIB)  # less than before changes nothing
    prefault.want(0, 1 << 50)
    wait_until(lambda: prefault.done(0) >= cache.num_bytes)
    assert prefault.done(0) == cache.extent(1 << 40) and prefault.done(1) == 64 * MIB
    with pytest.raises(IndexError):
        prefault.want(2, 1)


def test_what_lies_in_a_page_stays() -> None:
    cache = cache_of(16)
    block = np.random.default_rng(0).integers(0, 1 << 14, (2, 16, 4, 64)).astype(np.uint16)
    for number in (0, 500, 1023):
        cache.write_block(number, block)
    prefault = ops.Prefault([cache])
    prefault.want(0, cache.num_bytes)
    wait_until(lambda: prefault.done(0) >= cache.num_bytes)
    for number, expected in ((0, block), (500, block), (1023, block), (7, np.zeros_like(block))):
        read = np.empty_like(block)
        cache.read_block(number, read)
        assert np.array_equal(read, expected)


def test_nothing_is_done_while_somebody_computes() -> None:
    cache = cache_of(64)
    prefault = ops.Prefault([cache])
    prefault.hold()
    prefault.want(0, cache.num_bytes)
    time.sleep(0.3)  # a long step
    assert prefault.done(0) == 0
    prefault.rest()
    wait_until(lambda: prefault.done(0) >= cache.num_bytes)


def test_a_fork_and_an_exit_do_not_wait_for_the_thread() -> None:
    code = """
import os
from headrace.kernels.cpu import _ops
cache = _ops.kv_caches(8192, 16, [(4, 64)], "bfloat16")[0]
prefault = _ops.Prefault([cache])
prefault.want(0, cache.num_bytes)
child = os.fork()
if child == 0:
    del prefault, cache
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print("ended", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "ended\n"
