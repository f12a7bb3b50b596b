"""What a kind of KV group means for block tables: which entries hold blocks, for how long, and what can be hit.

One policy object a group; a new kind of group is one more class here. The block manager asks, and decides nothing
by the kind of a group.
"""

from collections.abc import Container, Sequence

from .block_pool import NULL_BLOCK, BlockPool
from .groups import KVGroup


class FullPolicy:
    """Keeps every block: each entry holds one, and a hit needs all of them. Owns the group's pool.

    Entry i of a table stands for positions [i * block_size, (i + 1) * block_size). A row computes positions
    [start, end) and has entries for all positions up to `end`.
    """

    is_read_in_same_step = True
    """a request may hit blocks that another one fills in the same step"""

    def __init__(self, group: KVGroup, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size

    # ---- what one request alone can do -------------------------------------------------------------------------
    def max_tokens(self) -> int | None:
        """Tokens that one request, alone, can keep; None: any number."""
        return (self.pool.num_blocks - 1) * self.block_size

    def max_chunk(self) -> int | None:
        """Tokens that one request, alone, can always compute in one step; None: any number."""
        return None

    # ---- prefix hits -------------------------------------------------------------------------------------------
    def cached_run(self, hashes: Sequence[bytes], length: int, unwritten: Container[bytes]) -> int:
        """The longest hit of at most `length` blocks. unwritten: what the step that is being scheduled fills."""
        find = self.pool.find
        for i in range(length):
            if find(hashes[i]) is None:
                return i
        return length

    def first_hit(self, num_blocks: int) -> int:
        """The first entry that a hit of so many blocks needs."""
        return 0

    # ---- tables ------------------------------------------------------------------------------------------------
    def num_reserved(self, num_new: int, num_missing: int, spare: int) -> int:
        """Free blocks that must be there to admit a request. num_new: entries that its first row adds.
        num_missing: those that all its tokens add."""
        return num_missing + spare

    def num_needed(self, first: int, last: int, end: int) -> int:
        """Free blocks without which a table cannot grow from `first` to `last` entries, for rows up to `end`."""
        return last - first

    def extend(self, table: list[int], last: int, end: int, checkpoints: Container[int]) -> None:
        """Append entries up to `last`; there are `num_needed` free blocks. checkpoints: entries that later requests
        may want to start behind."""
        table.extend(self.pool.take(last - len(table), behind=table[-1] if table else NULL_BLOCK))

    def first_kept(self, start: int) -> int:
        """The first entry that a row from `start` on still needs."""
        return 0

    def return_at(self, first_kept: int) -> int | None:
        """The start of a row from which entry `first_kept` is needed no more; None: never."""
        return None

    def give_back(self, table: list[int], first: int, last: int, checkpoints: Container[int]) -> None:
        """Return the blocks of entries [first, last), which no row will need."""
        self.pool.release(table[first:last])
        table[first:last] = [NULL_BLOCK] * (last - first)

    # ---- figures and checks -------------------------------------------------------------------------------------
    def num_used(self, index: int, num_computed: int) -> int:
        """Slots of entry `index` that hold what the next row reads."""
        return max(0, min(self.block_size, num_computed - index * self.block_size))

    def check(self, table: Sequence[int], first_kept: int) -> None:
        """Assert that a table is as this policy leaves it."""
        assert not any(table[:first_kept]) and all(table[first_kept:]), f"a hole in {table}"


class SlidingPolicy(FullPolicy):
    """Returns blocks that left the window; a hit needs those that the first token after it sees."""

    def __init__(self, group: KVGroup, num_blocks: int, block_size: int) -> None:
        super().__init__(group, num_blocks, block_size)
        self.window = group.window
        self._max_chunk = (num_blocks - 2) * block_size - self.window + 1
        assert self._max_chunk >= 1, f"{num_blocks} blocks do not hold a window of {self.window} tokens"

    def max_tokens(self) -> int | None:
        return None

    def max_chunk(self) -> int | None:
        return self._max_chunk

    def cached_run(self, hashes: Sequence[bytes], length: int, unwritten: Container[bytes]) -> int:
        find = self.pool.find
        first = self.first_hit(length)
        i = length - 1
        while i >= first:
            if find(hashes[i]) is None:
                length = i
                first = self.first_hit(length)
            i -= 1
        return length

    def first_hit(self, num_blocks: int) -> int:
        return self.first_kept(num_blocks * self.block_size)

    def num_reserved(self, num_new: int, num_missing: int, spare: int) -> int:
        return num_new

    def first_kept(self, start: int) -> int:
        return max(0, start - self.window + 1) // self.block_size

    def return_at(self, first_kept: int) -> int | None:
        return (first_kept + 1) * self.block_size + self.window - 1

    def num_used(self, index: int, num_computed: int) -> int:
        begin, seen_from = index * self.block_size, max(0, num_computed - self.window + 1)
        return max(0, min(begin + self.block_size, num_computed) - max(begin, seen_from))


class StatePolicy(FullPolicy):
    """Keeps what a recurrence knows after some positions: a block holds a state, not the KV of its positions.

    Entry i holds the state after the last position computed in block i, and from the block's end on it stays as it
    is: a checkpoint, behind which another request can start. A row from `start` on reads the state after
    start - 1 and writes the one after its last position, so that most entries of a prompt are null; blocks for
    checkpoints (every `group.checkpoint_tokens`, and where the request is asked to) are taken while half of the pool
    is free. Nothing is ever copied: the rows after a hit write into the next entry.

    Speculation: a block has `group.num_lanes` slots (drafts and one more), and the state after position p lies in
    lane p % num_lanes. So the states after all positions of a row with drafts are kept, and rolling back is reading
    another one: no recomputation, at the price of as many states as there are drafts.

            | block 0 | block 1 | block 2 | block 3 | block 4
      table |  null   |  null   |  state  |  state  |   -       a prompt of 58 tokens, block_size 16
            |         |         | after 47| after 57|           the next row reads 57, a later request may hit 47

    A request must not hit a state that another one writes in the same step: rows of a step run side by side.
    """

    is_read_in_same_step = False

    def __init__(self, group: KVGroup, num_blocks: int, block_size: int, prefix_caching: bool) -> None:
        super().__init__(group, num_blocks, block_size)
        self.num_lanes = group.num_lanes
        self.checkpoint_every = max(1, group.checkpoint_tokens // block_size)
        self.prefix_caching = prefix_caching

    def max_tokens(self) -> int | None:
        return None

    def cached_run(self, hashes: Sequence[bytes], length: int, unwritten: Container[bytes]) -> int:
        found = (n for n in range(length, 0, -1) if self.pool.find(hashes[n - 1]) is not None)
        return next((n for n in found if hashes[n - 1] not in unwritten), 0)

    def first_hit(self, num_blocks: int) -> int:
        return max(0, num_blocks - 1)

    def num_reserved(self, num_new: int, num_missing: int, spare: int) -> int:
        return 2

    def num_needed(self, first: int, last: int, end: int) -> int:
        return last - max(first, self._first_needed(end))

    def extend(self, table: list[int], last: int, end: int, checkpoints: Container[int]) -> None:
        needed = self._first_needed(end)
        left = max(0, self.pool.num_free - self.num_needed(len(table), last, end) - self.pool.num_blocks // 2)
        for index in range(len(table), last):
            is_wanted = index >= needed
            if not is_wanted and left and self.prefix_caching and self._lasts(index, checkpoints):
                is_wanted, left = True, left - 1
            table.append(self.pool.take(1)[0] if is_wanted else NULL_BLOCK)

    def first_kept(self, start: int) -> int:
        return max(0, (start - 1) // self.block_size - self.prefix_caching)

    def return_at(self, first_kept: int) -> int | None:
        return (first_kept + 1 + self.prefix_caching) * self.block_size + 1

    def give_back(self, table: list[int], first: int, last: int, checkpoints: Container[int]) -> None:
        # A state a block for every request would soon drive all others out; the last one of an answer is kept.
        for index in range(first, last):
            if table[index] != NULL_BLOCK and not self._lasts(index, checkpoints):
                self.pool.unpublish_own(table[index])
        super().give_back(table, first, last, checkpoints)

    def num_used(self, index: int, num_computed: int) -> int:
        return self.block_size if index * self.block_size < num_computed else 0

    def check(self, table: Sequence[int], first_kept: int) -> None:
        assert not any(table[:first_kept]) and (not table or table[-1]), f"no state at the end of {table}"

    def _first_needed(self, end: int) -> int:
        """The first entry for which a row up to `end` must have a block: rolling back may lead to it."""
        return max(0, end - self.num_lanes) // self.block_size

    def _lasts(self, index: int, checkpoints: Container[int]) -> bool:
        return (index + 1) % self.checkpoint_every == 0 or index in checkpoints


def make_policy(group: KVGroup, num_blocks: int, block_size: int, prefix_caching: bool) -> FullPolicy:
    """The policy of a group, with a pool of so many blocks."""
    if group.kind == "state":
        return StatePolicy(group, num_blocks, block_size, prefix_caching)
    return {"full": FullPolicy, "sliding": SlidingPolicy}[group.kind](group, num_blocks, block_size)
