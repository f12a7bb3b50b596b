"""The KV blocks of one group: who uses them, which are free, and which hold a prefix that may be used again."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

NULL_BLOCK = 0
"""Never handed out. A block table names it where no block is needed; padding may be written there."""


class BlockPool:
    """Owns the block ids [1, num_blocks) of one KV group.

    A block is used (ref_count > 0) or in the free queue, never both. A published block can be found by its
    hash, used or free, until it is handed out again. The free queue is ordered by what is lost least:

        take -> | never or no longer published | published, least recently used ... most recently used |

    The queue is an OrderedDict: as O(1) as linked lists over arrays, and somewhat faster in CPython.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, f"a pool needs the null block and one more, got {num_blocks}"
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that `take` can hand out; published ones among them."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Hand out blocks; what they held can no longer be found. The caller has looked at num_free."""
        assert count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free"
        taken = []
        for _ in range(count):
            block_id, _none = self._free.popitem(last=False)
            block_hash = self._hashes[block_id]
            if block_hash is not None:
                del self._by_hash[block_hash]
                self._hashes[block_id] = None
            self._ref_counts[block_id] = 1
            taken.append(block_id)
        return taken

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

    def unpublish_own(self, block_id: int) -> None:
        """Unpublish a block unless somebody besides the caller uses it."""
        if self._ref_counts[block_id] == 1:
            self.unpublish(block_id)

    def unpublish_all(self) -> None:
        """Forget what every block holds."""
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
        assert NULL_BLOCK not in self._free and self._ref_counts[NULL_BLOCK] == 0, "the null block was handed out"
        num_published = sum(block_hash is not None for block_hash in self._hashes)
        assert num_published == len(self._by_hash), f"{num_published} hashes, {len(self._by_hash)} published"
