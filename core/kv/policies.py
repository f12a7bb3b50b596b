"""What a kind of KV group means for block tables: which entries hold blocks, for how long, and what can be hit.

One policy object a group; a new kind of group is one more class here. The block manager asks, and decides nothing
by the kind of a group.
"""

from collections.abc import Callable, Sequence

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
    def cached_run(self, find: Callable[[bytes], int | None], hashes: Sequence[bytes], length: int) -> int:
        """The longest hit of at most `length` blocks; find: from a hash to its block, if that may be hit."""
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

    def extend(self, table: list[int], last: int, end: int) -> None:
        """Append entries up to `last`; there are `num_needed` free blocks."""
        table.extend(self.pool.take(last - len(table)))

    def first_kept(self, start: int) -> int:
        """The first entry that a row from `start` on still needs."""
        return 0

    def return_at(self, first_kept: int) -> int | None:
        """The start of a row from which entry `first_kept` is needed no more; None: never."""
        return None

    def give_back(self, table: list[int], first: int, last: int) -> None:
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

    def cached_run(self, find: Callable[[bytes], int | None], hashes: Sequence[bytes], length: int) -> int:
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


def make_policy(group: KVGroup, num_blocks: int, block_size: int) -> FullPolicy:
    """The policy of a group, with a pool of so many blocks."""
    return {"full": FullPolicy, "sliding": SlidingPolicy}[group.kind](group, num_blocks, block_size)
