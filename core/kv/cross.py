"""The Cross KV group: keys and values of what an encoder made of requests' other inputs, shared by content."""

from collections.abc import Sequence

from .block_pool import BlockPool
from .groups import KVGroup


class CrossTable:
    """The blocks of one request's encoder output, all taken at admission; written by the CrossPool alone.

    hashes: one a block, of the whole input and the block's place; empty if nothing is shared. must_write: the
    request's first step runs the encoder.
    """

    __slots__ = ("blocks", "hashes", "must_write", "num_blocks", "num_tokens")

    def __init__(self, num_tokens: int, num_blocks: int, hashes: Sequence[bytes]) -> None:
        self.num_tokens = num_tokens
        self.num_blocks = num_blocks
        self.hashes = tuple(hashes)
        self.blocks: list[int] = []
        self.must_write = False


class CrossPool:
    """Owns the blocks of the Cross group. A table is filled whole or not at all, hit whole or not at all, and does
    not grow; unlike a prefix, an input has no part that is of use to another input."""

    def __init__(self, group: KVGroup, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.max_tokens = group.num_tokens

    def table(self, num_tokens: int, root: bytes | None) -> CrossTable:
        """An empty table for an input of so many tokens. root: names its content; None: it is not shared."""
        assert 0 < num_tokens <= self.max_tokens, f"an input of {num_tokens} tokens, of {self.max_tokens} at most"
        num_blocks = -(-num_tokens // self.block_size)
        hashes = () if root is None else [root + i.to_bytes(4, "little") for i in range(num_blocks)]
        return CrossTable(num_tokens, num_blocks, hashes)

    def is_stored(self, table: CrossTable) -> bool:
        """True if the encoder need not run."""
        return bool(table.hashes) and all(self.pool.find(block_hash) is not None for block_hash in table.hashes)

    def has_room(self, table: CrossTable) -> bool:
        """True if `fill` can be called."""
        return self.is_stored(table) or table.num_blocks <= self.pool.num_free

    def fill(self, table: CrossTable) -> list[tuple[int, bytes]]:
        """Give a table its blocks: those that hold its content, or new ones that the next step writes and others may
        hit from then on, which are returned with their hashes."""
        assert not table.blocks, "admitted twice"
        found = [self.pool.find(block_hash) for block_hash in table.hashes]
        hit = [block_id for block_id in found if block_id is not None]
        table.must_write = len(hit) < table.num_blocks
        if not table.must_write:
            self.pool.share(hit)
            table.blocks = hit
            return []
        table.blocks = self.pool.take(table.num_blocks)
        pairs = zip(table.blocks, table.hashes, strict=bool(table.hashes))
        return [(block_id, block_hash) for block_id, block_hash in pairs if self.pool.publish(block_id, block_hash)]

    def release(self, table: CrossTable) -> None:
        """Take the blocks back; their content can be hit until they are handed out again."""
        self.pool.release(table.blocks)
        table.blocks = []
