"""The block pool against a model: ref counts, the order of the free queue, what can be found."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.kv.block_pool import NULL_BLOCK, RUN_BLOCKS, BlockPool

NUM_BLOCKS = 2 * RUN_BLOCKS + 3


class PoolMachine(RuleBasedStateMachine):
    """The model: tables of users, a plain list as free queue (next to be taken first), a dict of hashes."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables: list[list[int]] = []
        self.queue = list(range(1, NUM_BLOCKS))
        self.hashes: dict[int, bytes] = {}

    @rule(count=st.integers(0, 12), data=st.data())
    def take(self, count: int, data: st.DataObject) -> None:
        count = min(count, len(self.queue))
        table = data.draw(st.sampled_from([[], *self.tables]))
        behind = table[-1] if table else NULL_BLOCK
        taken = self.pool.take(count, behind)
        for block_id in taken:
            assert block_id in self.queue
            blank = [b for b in self.queue if b not in self.hashes]
            runs = {b // RUN_BLOCKS for b in blank} - {
                b // RUN_BLOCKS for b in range(1, NUM_BLOCKS) if b not in blank
            }
            follows = (
                behind and behind + 1 in blank and ((behind + 1) % RUN_BLOCKS or (behind + 1) // RUN_BLOCKS in runs)
            )
            if follows:
                assert block_id == behind + 1
            elif runs:
                assert block_id // RUN_BLOCKS in runs and (block_id == 1 or block_id % RUN_BLOCKS == 0)
            else:
                assert block_id == self.queue[0]
            self.queue.remove(block_id)
            self.hashes.pop(block_id, None)
            behind = block_id
        self.tables.append([NULL_BLOCK, *taken])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        for block_id in reversed(table):
            if block_id == NULL_BLOCK or any(block_id in other for other in self.tables):
                continue
            if block_id in self.hashes:
                self.queue.append(block_id)
            else:
                self.queue.insert(0, block_id)

    @rule(data=st.data(), key=st.integers(0, 5))
    def publish(self, data: st.DataObject, key: int) -> None:
        used = sorted({b for table in self.tables for b in table if b and b not in self.hashes})
        if used:
            block_id, block_hash = data.draw(st.sampled_from(used)), b"%d" % key
            is_new = block_hash not in self.hashes.values()
            assert self.pool.publish(block_id, block_hash) == is_new
            if is_new:
                self.hashes[block_id] = block_hash

    @rule(key=st.integers(0, 5))
    def hit(self, key: int) -> None:
        found = self.pool.find(b"%d" % key)
        assert found == next((b for b, block_hash in self.hashes.items() if block_hash == b"%d" % key), None)
        if found is not None:
            assert self.pool.num_free_among([NULL_BLOCK, found]) == (found in self.queue)
            self.pool.share([NULL_BLOCK, found])
            self.tables.append([found])
            if found in self.queue:
                self.queue.remove(found)

    @rule(data=st.data(), is_right=st.booleans())
    def unpublish(self, data: st.DataObject, is_right: bool) -> None:
        if self.hashes:
            block_id = data.draw(st.sampled_from(sorted(self.hashes)))
            self.pool.unpublish(block_id, self.hashes[block_id] if is_right else b"other")
            if is_right:
                del self.hashes[block_id]
                if block_id in self.queue:
                    self.queue.remove(block_id)
                    self.queue.insert(0, block_id)

    @rule()
    def unpublish_all(self) -> None:
        self.pool.unpublish_all()
        self.hashes.clear()

    @invariant()
    def is_sound(self) -> None:
        assert self.pool.num_free == len(self.queue)
        self.pool.check_integrity(self.tables)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


def test_deepest_published_block_is_lost_first() -> None:
    pool = BlockPool(6)
    table = pool.take(4)
    assert table == [1, 2, 3, 4]
    for i, block_id in enumerate(table[:3]):
        assert pool.publish(block_id, b"%d" % i)
    pool.release(table)
    assert pool.take(5) == [table[3], 5, table[2], table[1], table[0]]


def test_requests_that_grow_side_by_side_have_runs_of_their_own() -> None:
    pool = BlockPool(4 * RUN_BLOCKS)
    first, second = pool.take(2), pool.take(3)
    assert first == [1, 2] and second == [RUN_BLOCKS, RUN_BLOCKS + 1, RUN_BLOCKS + 2]
    for _ in range(RUN_BLOCKS):
        first += pool.take(1, behind=first[-1])
        second += pool.take(1, behind=second[-1])
    for table in (first, second):
        pieces = 1 + sum(b != a + 1 for a, b in zip(table, table[1:], strict=False))
        assert pieces == 2, f"a run, and a piece of another one: {table}"
    pool.release(first)
    assert pool.take(3) == [1, 2, 3], "what was given back last"
    assert pool.take(3) == list(range(2 * RUN_BLOCKS, 2 * RUN_BLOCKS + 3))


def test_what_was_used_before_is_taken_before_what_never_was() -> None:
    pool = BlockPool(100 * RUN_BLOCKS)
    table = pool.take(3 * RUN_BLOCKS)
    pool.release(table)
    for _ in range(5):
        again = pool.take(3 * RUN_BLOCKS)
        assert set(again) == set(table)
        pool.release(again)


def test_a_pool_without_a_run_that_is_free_gives_what_there_is() -> None:
    pool = BlockPool(2 * RUN_BLOCKS)
    tables = [pool.take(1), pool.take(1)]
    rest = pool.take(2 * RUN_BLOCKS - 3)
    assert sorted(tables[0] + tables[1] + rest) == list(range(1, 2 * RUN_BLOCKS)) and pool.num_free == 0


def test_programmer_errors_are_asserted() -> None:
    with pytest.raises(AssertionError, match="null block and one more, got 1"):
        BlockPool(1)
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 free"):
        pool.take(3)
    table = pool.take(1)
    pool.release(table)
    with pytest.raises(AssertionError, match="block 1 was released twice"):
        pool.release(table)
    with pytest.raises(AssertionError, match="block 1: ref_count 0, in 1 tables"):
        pool.check_integrity([[1]])
