"""The block manager: hits over groups, windows, publishing and undoing, the waste figure."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.kv.block_manager import BlockManager, RequestBlocks
from headrace.core.kv.groups import KVGroup

FULL = KVGroup(kind="full", layer_indices=(0,), heads=((1, 8),))
BS = 4


def sliding(window: int) -> KVGroup:
    return KVGroup(kind="sliding", layer_indices=(1,), heads=((1, 8),), window=window)


def make(*groups: KVGroup, num_blocks: int = 50, prefix_caching: bool = True) -> BlockManager:
    return BlockManager(
        groups=groups, num_blocks=[num_blocks] * len(groups), block_size=BS, prefix_caching=prefix_caching
    )


def run(manager: BlockManager, token_ids: list[int], *, step: int = 1, salt: str = "") -> RequestBlocks:
    """A request that was computed up to its last token but one."""
    blocks = manager.new_request(cache_salt=salt)
    hit = manager.find_hit(blocks, token_ids)
    assert manager.admit(blocks, hit=hit, end=len(token_ids), num_tokens=len(token_ids), spare=0)
    manager.publish(blocks, token_ids, len(token_ids), step)
    return blocks


def test_first_row_tells_the_whole_table_and_later_ones_what_is_new() -> None:
    manager = make(FULL, sliding(5))
    prompt = list(range(18))
    first = run(manager, prompt)
    assert manager.tell(first) == ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    second = run(manager, [*prompt[:16], 99])
    # 16 tokens hit; token 16 sees 12 ... 16 through the window: block 3 and its own, with which a run begins.
    assert manager.tell(second) == ([1, 2, 3, 4, 8], [0, 0, 0, 4, 8])
    assert manager.tell(second) == ([], [])
    assert manager.grow(second, start=20, end=21)
    assert manager.tell(second) == ([9], [9])
    assert second.tables[1] == [0, 0, 0, 0, 8, 9]
    manager.check_integrity([first, second])


def test_at_most_all_tokens_but_one_hit() -> None:
    manager = make(FULL)
    run(manager, list(range(16)))
    assert manager.find_hit(manager.new_request(), list(range(16))) == 12
    assert manager.find_hit(manager.new_request(), list(range(17))) == 16


def test_salt_extras_and_switch_keep_prefixes_apart() -> None:
    manager, prompt = make(FULL), list(range(17))
    run(manager, prompt, salt="a")
    assert manager.find_hit(manager.new_request(cache_salt="a"), prompt) == 16
    assert manager.find_hit(manager.new_request(cache_salt="b"), prompt) == 0
    assert manager.find_hit(manager.new_request(), prompt) == 0
    assert manager.find_hit(manager.new_request(cache_salt="a", extras=(b"x",)), prompt) == 0
    off = make(FULL, prefix_caching=False)
    run(off, prompt)
    assert off.find_hit(off.new_request(), prompt) == 0


@given(
    cached=st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=3, max_size=3),
    windows=st.lists(st.sampled_from([0, 1, 2, 4, 5, 9, 13, 30]), min_size=3, max_size=3),
    num_tokens=st.integers(1, 40),
)
def test_hit_is_the_longest_that_all_groups_have(
    cached: list[list[bool]], windows: list[int], num_tokens: int
) -> None:
    """Against the definition: each position that the first token after the hit sees is in a cached block."""
    manager = make(*(sliding(window) if window else FULL for window in windows))
    blocks, token_ids = manager.new_request(), list(range(num_tokens))
    assert blocks.chain is not None
    blocks.chain.extend(blocks.hashes, list(range(36)), BS)
    for pool, is_cached in zip(manager.pools, cached, strict=True):
        for block_hash, wanted in zip(blocks.hashes, is_cached, strict=True):
            if wanted:
                assert pool.publish(pool.take(1)[0], block_hash)

    def is_hit(length: int) -> bool:
        return all(
            is_cached[position // BS]
            for window, is_cached in zip(windows, cached, strict=True)
            for position in range(max(0, length - window + 1) if window else 0, length)
        )

    candidates = [n for n in range(0, min(num_tokens - 1, 36) + 1, BS) if is_hit(n)]
    assert manager.find_hit(manager.new_request(), token_ids) == max(candidates)


def test_refused_admission_and_growth_change_nothing() -> None:
    manager = make(FULL, num_blocks=6)
    first = run(manager, list(range(9)))
    blocks = manager.new_request()
    prompt = [*range(8), *range(50, 60)]
    hit = manager.find_hit(blocks, prompt)
    assert hit == 8
    assert not manager.admit(blocks, hit=hit, end=12, num_tokens=18, spare=0), "all of the prompt must fit"
    assert not manager.admit(blocks, hit=hit, end=16, num_tokens=16, spare=1), "spare blocks must stay"
    manager.check_integrity([first])
    assert manager.admit(blocks, hit=hit, end=16, num_tokens=16, spare=0)
    assert not manager.grow(first, start=8, end=13)
    manager.check_integrity([first, blocks])


def test_free_hit_blocks_are_not_counted_twice() -> None:
    manager = make(FULL, num_blocks=4)
    manager.release(run(manager, list(range(12))))
    blocks = manager.new_request()
    assert manager.find_hit(blocks, list(range(13))) == 12
    assert not manager.admit(blocks, hit=12, end=13, num_tokens=13, spare=0), "the hit takes all three blocks"


def test_failed_step_takes_back_what_it_and_later_ones_published() -> None:
    manager = make(FULL)
    a = run(manager, list(range(8)), step=1)
    manager.step_done(1)
    b = run(manager, [*range(8), *range(20, 28)], step=2)
    c = run(manager, [*range(8), *range(20, 28), *range(40, 44)], step=3)
    manager.step_failed(2)
    assert manager.find_hit(manager.new_request(), [*range(8), *range(20, 28), *range(40, 45)]) == 8
    for blocks in (a, b, c):
        manager.release(blocks)
    manager.check_integrity([])
    manager.forget_all()
    assert manager.find_hit(manager.new_request(), list(range(9))) == 0
    manager.check_integrity([])


def test_a_block_handed_out_again_is_not_unpublished_for_its_past() -> None:
    manager = make(FULL, num_blocks=2)
    manager.release(run(manager, [1, 2, 3, 4], step=1))
    manager.release(run(manager, [5, 6, 7, 8], step=0))
    manager.step_failed(1)
    assert manager.find_hit(manager.new_request(), [5, 6, 7, 8, 9]) == 4


def test_bounds_of_one_request() -> None:
    manager = BlockManager(groups=[FULL, sliding(6)], num_blocks=[11, 5], block_size=BS)
    assert manager.max_tokens_alone == 40
    # Positions a - 5 ... a + n - 1 in the worst place touch ceil((5 + n - 1) / 4) + 1 <= 4 blocks.
    assert manager.max_chunk == 7
    with pytest.raises(AssertionError, match="3 blocks do not hold a window of 5 tokens"):
        BlockManager(groups=[sliding(5)], num_blocks=[3], block_size=BS)


def test_usage_counts_shared_blocks_once_and_what_left_the_window_as_waste() -> None:
    manager = make(FULL, sliding(3))
    first = run(manager, list(range(10)))
    second = run(manager, [*range(8), 50])
    usage = manager.usage([(first, 10), (second, 9)])
    # full: blocks 0, 1 (shared, 8 tokens), one of first (2), one of second (1)
    # sliding: first holds three blocks and reads 8, 9; second holds block 1 (shared) and its own, and reads 7, 8
    assert usage.slots_allocated == 4 * BS + 4 * BS
    assert usage.slots_used == 11 + (2 + 1 + 1)
    assert usage.waste == pytest.approx(1 - 15 / 32)
    assert manager.usage([]).waste == 0.0
