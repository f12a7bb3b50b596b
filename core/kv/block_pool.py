"""The KV blocks of one group: who uses them, which are free, and which hold a prefix that may be used again."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

NULL_BLOCK = 0
"""Never handed out. A block table names it where no block is needed; padding may be written there."""

RUN_BLOCKS = 8
"""Blocks [n * RUN_BLOCKS, (n + 1) * RUN_BLOCKS) are a run: where a device keeps blocks in memory in order, a
request whose blocks are runs is read faster."""


class BlockPool:
    """Owns the block ids [1, num_blocks) of one KV group.

    A block is used (ref_count > 0) or in the free queue, never both. A published block can be found by its
    hash, used or free, until it is handed out again. The free queue is ordered by what is lost least:

        take -> | never or no longer published | published, least recently used ... most recently used |

    Of the former, which are blank, a request is given the one behind its last block, or else the first of a run that
    is blank as a whole: so requests that grow side by side do not lie between each other while there is room.

    The queue is an OrderedDict: as O(1) as linked lists over arrays, and somewhat faster in CPython.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, f"a pool needs the null block and one more, got {num_blocks}"
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        num_runs = -(-num_blocks // RUN_BLOCKS)
        self._num_filled = [0] * num_runs  # blocks of each run that are not blank
        self._blank_runs: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_runs))

    @property
    def num_free(self) -> int:
        """Blocks that `take` can hand out; published ones among them."""
        return len(self._free)

    def take(self, count: int, behind: int = NULL_BLOCK) -> list[int]:
        """Hand out blocks; what they held can no longer be found. The caller has looked at num_free.

        behind: the block whose positions come before those of the first.
        """
        assert count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free"
        taken = []
        for _ in range(count):
            behind = self._next(behind)
            del self._free[behind]
            block_hash = self._hashes[behind]
            if block_hash is not None:
                del self._by_hash[block_hash]
                self._hashes[behind] = None
            else:
                self._fill(behind)
            self._ref_counts[behind] = 1
            taken.append(behind)
        return taken

    def _next(self, behind: int) -> int:
        """The block to hand out next."""
        block_id = behind + 1
        if behind != NULL_BLOCK and block_id < self.num_blocks:
            is_blank = self._ref_counts[block_id] == 0 and self._hashes[block_id] is None
            if is_blank and (block_id % RUN_BLOCKS or block_id // RUN_BLOCKS in self._blank_runs):
                return block_id
        for run in self._blank_runs:
            return max(1, run * RUN_BLOCKS)
        return next(iter(self._free))

    def _fill(self, block_id: int) -> None:
        """A blank block is in use."""
        run = block_id // RUN_BLOCKS
        self._num_filled[run] += 1
        self._blank_runs.pop(run, None)

    def _empty(self, block_id: int) -> None:
        """A block became blank."""
        run = block_id // RUN_BLOCKS
        self._num_filled[run] -= 1
        if self._num_filled[run] == 0:  # to the front: memory that was used before is there
            self._blank_runs[run] = None
            self._blank_runs.move_to_end(run, last=False)

    def find(self, block_hash: bytes) -> int | None:
        """The block published under a hash."""
        return self._by_hash.get(block_hash)

    def cached_ids(self) -> list[int]:
        """Blocks that no request uses, but that hold a prefix which can still be found."""
        return [block_id for block_id in self._by_hash.values() if self._ref_counts[block_id] == 0]

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        """How many of these (distinct) blocks are free: sharing them takes as many from num_free."""
        ref_counts = self._ref_counts
        return sum(1 for block_id in block_ids if ref_counts[block_id] == 0 and block_id != NULL_BLOCK)

    def share(self, block_ids: Iterable[int]) -> None:
        """One more user for each published block. The null block is passed over."""
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """One user less for the blocks of a table, given in its order. The null block is passed over.

        Deepest first into the queue: a prefix is useful without its continuation, not the other way round.
        """
        for block_id in reversed(block_ids):
            if block_id == NULL_BLOCK:
                continue
            count = self._ref_counts[block_id] - 1
            assert count >= 0, f"block {block_id} was released twice"
            self._ref_counts[block_id] = count
            if count == 0:
                self._free[block_id] = None
                if self._hashes[block_id] is None:
                    self._free.move_to_end(block_id, last=False)
                    self._empty(block_id)

    def publish(self, block_id: int, block_hash: bytes) -> bool:
        """Let a block be found by its hash. False if another block already is, and this one stays unpublished."""
        if block_hash in self._by_hash:
            return False
        assert self._hashes[block_id] is None, f"block {block_id} was published twice"
        self._by_hash[block_hash] = block_id
        self._hashes[block_id] = block_hash
        return True

    def unpublish(self, block_id: int, block_hash: bytes | None = None) -> None:
        """Let a block no longer be found; with a hash, only if that is what it was published under."""
        published = self._hashes[block_id]
        if published is None or (block_hash is not None and published != block_hash):
            return
        del self._by_hash[published]
        self._hashes[block_id] = None
        if block_id in self._free:
            self._free.move_to_end(block_id, last=False)
            self._empty(block_id)

    def unpublish_own(self, block_id: int) -> None:
        """Unpublish a block unless somebody besides the caller uses it."""
        if self._ref_counts[block_id] == 1:
            self.unpublish(block_id)

    def unpublish_all(self) -> None:
        """Forget what every block holds."""
        for block_id in self.cached_ids():
            self._empty(block_id)
        self._by_hash.clear()
        self._hashes = [None] * self.num_blocks

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert the invariants, given the block tables of all live requests."""
        used = Counter(block_id for table in tables for block_id in table if block_id != NULL_BLOCK)
        for block_id in range(1, self.num_blocks):
            count = self._ref_counts[block_id]
            assert count == used[block_id], f"block {block_id}: ref_count {count}, in {used[block_id]} tables"
            assert (count == 0) == (block_id in self._free), f"block {block_id}: ref_count {count}, and in the queue"
            block_hash = self._hashes[block_id]
            assert block_hash is None or self._by_hash.get(block_hash) == block_id, f"block {block_id}: lost hash"
        for run, num_filled in enumerate(self._num_filled):
            block_ids = range(max(1, run * RUN_BLOCKS), min((run + 1) * RUN_BLOCKS, self.num_blocks))
            filled = sum(block_id not in self._free or self._hashes[block_id] is not None for block_id in block_ids)
            assert num_filled == filled, f"run {run}: {num_filled} blocks in use, {filled} found"
            assert (filled == 0) == (run in self._blank_runs), (
                f"run {run}: {filled} blocks in use, and counted as blank"
            )
        assert NULL_BLOCK not in self._free and self._ref_counts[NULL_BLOCK] == 0, "the null block was handed out"
        num_published = sum(block_hash is not None for block_hash in self._hashes)
        assert num_published == len(self._by_hash), f"{num_published} hashes, {len(self._by_hash)} published"
