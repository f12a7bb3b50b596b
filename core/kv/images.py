"""The rows that an encoder made of images, kept by content: a budget of blocks that requests share."""

from collections.abc import Sequence

from .block_pool import BlockPool

MAX_PATCHES = 16384
"""Of the images that requests which are admitted together bring: 16 images of 1024 patches."""


class ImageTable:
    """The blocks of one request's images, taken at admission; written by the ImagePool alone.

    hashes: of each image. num_blocks: of each. blocks: of each, empty where the image is not needed. must_write: by
    image, the request's first step runs the encoder for it.
    """

    __slots__ = ("blocks", "hashes", "must_write", "num_blocks")

    def __init__(self, hashes: Sequence[bytes], num_blocks: Sequence[int]) -> None:
        self.hashes = tuple(hashes)
        self.num_blocks = tuple(num_blocks)
        self.blocks: list[Sequence[int]] = [()] * len(hashes)
        self.must_write = [False] * len(hashes)


class ImagePool:
    """Owns the blocks. An image is kept whole or not at all, found by its hash, and evicted when its blocks are
    needed and no request holds them."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """num_blocks: the null block included."""
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size

    def table(self, hashes: Sequence[bytes], num_rows: Sequence[int]) -> ImageTable:
        """An empty table for images of so many rows."""
        return ImageTable(hashes, [-(-count // self.block_size) for count in num_rows])

    def missing(self, table: ImageTable, first: int = 0) -> list[int]:
        """The images from number `first` on that the encoder would have to read, equal ones once."""
        wanted = {table.hashes[i]: i for i in reversed(range(first, len(table.hashes)))}
        return sorted(i for i in wanted.values() if self._find(table, i) is None)

    def has_room(self, table: ImageTable, first: int) -> bool:
        """True if `fill` can be called."""
        missing = self.missing(table, first)
        new = sum(table.num_blocks[i] for i in missing)
        absent = {table.hashes[i] for i in missing}
        found = {
            block_id
            for i in range(first, len(table.hashes))
            if table.hashes[i] not in absent
            for block_id in self._find(table, i) or ()
        }
        return new + self.pool.num_free_among(found) <= self.pool.num_free

    def fill(self, table: ImageTable, first: int) -> list[tuple[int, bytes]]:
        """Give the images from number `first` on their blocks: those that hold them, or new ones that the next step
        writes and others may hit from then on, which are returned with their hashes."""
        assert not any(table.blocks), "admitted twice"
        published: list[tuple[int, bytes]] = []
        missing = self.missing(table, first)
        for i in range(first, len(table.hashes)):  # before blocks are handed out, which may evict these
            found = self._find(table, i)
            if found is not None:
                self.pool.share(found)
                table.blocks[i] = found
        for i in missing:
            blocks = self.pool.take(table.num_blocks[i])
            table.blocks[i], table.must_write[i] = blocks, True
            pairs = zip(blocks, _block_hashes(table, i), strict=True)
            published += [pair for pair in pairs if self.pool.publish(*pair)]
        for i in range(first, len(table.hashes)):
            if not table.blocks[i]:  # equal to one before
                twin = next(j for j in missing if table.hashes[j] == table.hashes[i])
                self.pool.share(table.blocks[twin])
                table.blocks[i] = table.blocks[twin]
        return published

    def release(self, table: ImageTable) -> None:
        """Take the blocks back; their content can be hit until they are handed out again."""
        for i, blocks in enumerate(table.blocks):
            self.pool.release(blocks)
            table.blocks[i], table.must_write[i] = (), False

    def _find(self, table: ImageTable, i: int) -> list[int] | None:
        found = [self.pool.find(block_hash) for block_hash in _block_hashes(table, i)]
        blocks = [block_id for block_id in found if block_id is not None]
        return blocks if len(blocks) == len(found) else None


def _block_hashes(table: ImageTable, i: int) -> list[bytes]:
    return [table.hashes[i] + n.to_bytes(4, "little") for n in range(table.num_blocks[i])]
