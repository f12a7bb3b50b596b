"""The KV blocks of all groups together: block tables, prefix hits, publishing, and what must be undone.

How a runner builds its tables: with a NewRequest all tables of its slot become empty, then each row appends
`new_blocks[group]` to the slot's table of that group. So the index of the first appended entry is the number of
entries told before, and entry i always stands for positions [i * block_size, (i + 1) * block_size). The first
row after admission tells the blocks of the prefix hit as well. Entries that a group does not need are told as
the null block 0. Blocks that are needed no more are handed on without a word: the runner keeps their stale ids,
and the device does not read them. The table of a Cross group, which is the last one if there is one, has entries for
the request's other input instead of its positions, and is told whole with the first row after admission.
"""

import sys
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from ..stages import ImageInput
from .block_pool import NULL_BLOCK, BlockPool
from .cross import CrossPool, CrossTable
from .groups import KVGroup
from .hashing import HashChain, start_chain
from .images import ImagePool, ImageTable
from .policies import FullPolicy, make_policy


class RequestBlocks:
    """The block tables of one request; written by the block manager alone.

    cross: that of the Cross group; images: of its images; the others are in `tables`. num_blocks: entries of each of
    those. num_told: entries that the runner knows. num_published: leading entries that were published or hit.
    publish_at: tokens from which there is one more to publish. first_kept: per group, the first entry that a row to
    come needs. return_at: the position from which one of them is needed no more. checkpoints: entries at whose end a
    state is worth keeping. hit_grows: the step that is being scheduled fills what makes the hit longer.
    """

    __slots__ = (
        "chain",
        "checkpoints",
        "cross",
        "first_kept",
        "hashes",
        "hit_grows",
        "images",
        "num_blocks",
        "num_published",
        "num_told",
        "publish_at",
        "return_at",
        "tables",
    )

    def __init__(self, num_groups: int, chain: HashChain | None, publish_at: int) -> None:
        self.chain = chain
        self.cross: CrossTable | None = None
        self.images: ImageTable | None = None
        self.hashes: list[bytes] = []
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.first_kept = [0] * num_groups
        self.num_blocks = self.num_told = self.num_published = 0
        self.checkpoints: set[int] = set()
        self.hit_grows = False
        self.publish_at = publish_at
        self.return_at = sys.maxsize


@dataclass(frozen=True, slots=True, kw_only=True)
class KVUsage:
    """Slots (places for one token's KV) of all groups: in blocks that requests hold, and with KV they may read."""

    slots_allocated: int
    slots_used: int

    @property
    def waste(self) -> float:
        """The share of allocated slots that hold nothing of use."""
        return 1 - self.slots_used / self.slots_allocated if self.slots_allocated else 0.0


class BlockManager:
    """Owns one pool per KV group and writes all block tables.

    Invariant: a block's ref_count is the number of tables that name it. A block is published from the moment a
    step that fills it is scheduled, and unpublished if that step fails; steps run in order, so whoever hits the
    block reads it after it is written.
    """

    def __init__(
        self,
        *,
        groups: Sequence[KVGroup],
        num_blocks: Sequence[int],
        block_size: int,
        prefix_caching: bool = True,
        hash_seed: int = 0,
        num_image_rows: int = 0,
    ) -> None:
        """num_blocks: per group, the null block included. Without groups nothing is cached, and all fit.
        num_image_rows: that are kept of images, those of the null block included."""
        assert len(groups) == len(num_blocks), (groups, num_blocks)
        self.block_size = block_size
        self.groups = tuple(groups)
        self.cross: CrossPool | None = None
        if groups and groups[-1].kind == "cross":
            self.cross = CrossPool(groups[-1], num_blocks[-1], block_size)
        self.images = ImagePool(num_image_rows // block_size, block_size) if num_image_rows else None
        num_own = len(groups) - (self.cross is not None)
        self.policies = tuple(
            make_policy(group, count, block_size, prefix_caching)
            for group, count in zip(groups[:num_own], num_blocks[:num_own], strict=True)
        )
        self.pools = tuple(policy.pool for policy in self.policies)
        self.nothing_new: tuple[Sequence[int], ...] = ((),) * len(self.groups)
        """new_blocks of a row whose tables did not grow"""
        self.max_chunk = min((n for p in self.policies if (n := p.max_chunk()) is not None), default=sys.maxsize)
        """tokens that one request, alone, can always compute in one step"""
        self.max_tokens_alone = min(
            (n for p in self.policies if (n := p.max_tokens()) is not None), default=sys.maxsize
        )
        """tokens that one request, alone, can keep"""
        self._prefix_caching = prefix_caching and bool(groups)
        self._hash_seed = hash_seed
        self._has_states = not all(policy.is_read_in_same_step for policy in self.policies)
        self._fresh: set[bytes] = set()
        """hashes of states that the step which is being scheduled writes"""
        self._published: dict[int, list[tuple[BlockPool, int, bytes]]] = {}
        self._step = self._last_done_step = 0

    # ---- one request ----------------------------------------------------------------------------------------
    def new_request(
        self,
        *,
        cache_salt: str = "",
        extras: Sequence[bytes] = (),
        num_encoder_tokens: int = 0,
        images: Sequence[ImageInput] = (),
    ) -> RequestBlocks:
        """Empty tables. `cache_salt` and `extras` separate its prefix from others', see `start_chain`.

        num_encoder_tokens: of its other input, whose content is among the extras; 0: it has none.
        """
        chain, digests = None, [image.digest() for image in images]
        if self._prefix_caching:
            marks: dict[int, bytes] = {}
            for image, digest in zip(images, digests, strict=True):
                block = int(image.places[0]) // self.block_size
                marks[block] = marks.get(block, b"") + digest
            chain = start_chain(self._hash_seed, cache_salt=cache_salt, extras=extras, marks=marks)
        blocks = RequestBlocks(len(self.policies), chain, self.block_size if chain is not None else sys.maxsize)
        if self.cross is not None and num_encoder_tokens:
            blocks.cross = self.cross.table(num_encoder_tokens, chain.root if chain is not None else None)
        if self.images is not None and images:
            root = start_chain(self._hash_seed, cache_salt=cache_salt).root  # the same whatever the prompt
            blocks.images = self.images.table([root + d for d in digests], [len(image.places) for image in images])
        return blocks

    def find_hit(self, blocks: RequestBlocks, token_ids: Sequence[int]) -> int:
        """Tokens at the start whose KV is cached in all groups: whole blocks, and at most len(token_ids) - 1.

        Each group in turn may shorten the hit; what is left when none does is the answer.
        """
        if blocks.chain is None:
            return 0
        blocks.chain.extend(blocks.hashes, token_ids, self.block_size)
        most = (len(token_ids) - 1) // self.block_size
        length = self._longest_hit(blocks.hashes, most, self.policies, self._fresh)
        if self._has_states:
            blocks.hit_grows = bool(self._fresh) and self._longest_hit(blocks.hashes, most, self.policies) > length
            # A state is kept where the prompt ends, and where it leaves what it shares with others, as KV tells.
            kv = [policy for policy in self.policies if policy.is_read_in_same_step]
            blocks.checkpoints = {most - 1, self._longest_hit(blocks.hashes, most, kv) - 1}
        return length * self.block_size

    def admit(
        self, blocks: RequestBlocks, *, hit: int, end: int, num_tokens: int, spare: int, first_image: int = 0
    ) -> bool:
        """Give a request without blocks the `hit` tokens that `find_hit` found and room for positions [hit, end).

        first_image: the first that a token behind the hit needs. A group may ask for room for all `num_tokens`
        besides `spare` blocks: it is better to wait than to be preempted in the middle of a prompt. False, with
        nothing changed, if a pool lacks blocks.
        """
        assert blocks.num_blocks == 0, "admitted twice"
        if self.cross is not None and blocks.cross is not None and not self.cross.has_room(blocks.cross):
            return False
        if self.images is not None and blocks.images is not None:
            if not self.images.has_room(blocks.images, first_image):
                return False
        num_hit = hit // self.block_size
        last = -(-end // self.block_size)
        hits: list[list[int]] = []
        for policy in self.policies:
            pool, first = policy.pool, policy.first_hit(num_hit)
            found = [pool.find(block_hash) for block_hash in blocks.hashes[first:num_hit]]
            table = [NULL_BLOCK] * first + [block_id for block_id in found if block_id is not None]
            assert len(table) == num_hit, "find_hit comes first"
            reserved = policy.num_reserved(last - num_hit, -(-num_tokens // self.block_size) - num_hit, spare)
            needed = max(reserved, policy.num_needed(num_hit, last, end))
            if needed > pool.num_free - pool.num_free_among(table):
                return False
            hits.append(table)
        for index, (policy, table) in enumerate(zip(self.policies, hits, strict=True)):
            policy.pool.share(table)
            policy.extend(table, last, end, blocks.checkpoints)
            blocks.tables[index] = table
            blocks.first_kept[index] = policy.first_hit(num_hit)
        if self.cross is not None and blocks.cross is not None:
            published = [(self.cross.pool, *pair) for pair in self.cross.fill(blocks.cross)]
            self._published.setdefault(self._step, []).extend(published)
        if self.images is not None and blocks.images is not None:
            filled = [(self.images.pool, *pair) for pair in self.images.fill(blocks.images, first_image)]
            self._published.setdefault(self._step, []).extend(filled)
        self._set_return_at(blocks)
        blocks.num_blocks = last
        blocks.num_told = 0
        if blocks.chain is not None:
            blocks.num_published = num_hit
            blocks.publish_at = hit + self.block_size
        return True

    def grow(self, blocks: RequestBlocks, *, start: int, end: int) -> bool:
        """Make room for positions up to `end`. False, and no table grows, if a pool lacks blocks.

        start: no position before it will be computed any more; what it does not see is given back.
        """
        if start >= blocks.return_at:
            for index, policy in enumerate(self.policies):
                first, kept = policy.first_kept(start), blocks.first_kept[index]
                if first > kept:
                    policy.give_back(blocks.tables[index], kept, first, blocks.checkpoints)
                    blocks.first_kept[index] = first
            self._set_return_at(blocks)
        first, last = blocks.num_blocks, -(-end // self.block_size)
        if last <= first:
            return True
        for policy in self.policies:
            if policy.pool.num_free < policy.num_needed(first, last, end):
                return False
        for table, policy in zip(blocks.tables, self.policies, strict=True):
            policy.extend(table, last, end, blocks.checkpoints)
        blocks.num_blocks = last
        return True

    def tell(self, blocks: RequestBlocks) -> tuple[Sequence[int], ...]:
        """Per group, the entries that the runner does not know yet; from now on it does."""
        first = blocks.num_told
        blocks.num_told = blocks.num_blocks
        told = tuple(table[first:] for table in blocks.tables)
        if self.cross is None:
            return told
        return (*told, blocks.cross.blocks if blocks.cross is not None and not first else ())

    def publish(self, blocks: RequestBlocks, token_ids: Sequence[int], num_written: int, step: int) -> None:
        """Let others find the full blocks of `token_ids` among the first `num_written` positions.

        step: the last one scheduled that writes some of them.
        """
        if blocks.chain is None:
            return
        blocks.chain.extend(blocks.hashes, token_ids, self.block_size)
        length = min(num_written, len(token_ids)) // self.block_size
        for i in range(blocks.num_published, length):
            block_hash = blocks.hashes[i]
            for table, policy in zip(blocks.tables, self.policies, strict=True):
                pool = policy.pool
                if table[i] != NULL_BLOCK and pool.publish(table[i], block_hash) and step > self._last_done_step:
                    self._published.setdefault(step, []).append((pool, table[i], block_hash))
                    if not policy.is_read_in_same_step:
                        self._fresh.add(block_hash)
        blocks.num_published = max(blocks.num_published, length)
        blocks.publish_at = (blocks.num_published + 1) * self.block_size

    def release(self, blocks: RequestBlocks) -> None:
        """Take all blocks back. What is published can still be hit until it is handed out again."""
        for index, (table, pool) in enumerate(zip(blocks.tables, self.pools, strict=True)):
            pool.release(table)
            blocks.tables[index] = []
            blocks.first_kept[index] = 0
        if self.cross is not None and blocks.cross is not None:
            self.cross.release(blocks.cross)
        self.release_images(blocks)
        blocks.num_blocks = blocks.num_told = blocks.num_published = 0
        if blocks.chain is not None:
            blocks.publish_at = self.block_size

    def release_images(self, blocks: RequestBlocks) -> None:
        """Take the blocks of its images back: all tokens that need them have been scheduled."""
        if self.images is not None and blocks.images is not None:
            self.images.release(blocks.images)

    # ---- steps ----------------------------------------------------------------------------------------------
    def begin_step(self, step: int = 0) -> None:
        """A step is scheduled from here on; what earlier ones fill is there for its rows."""
        self._step = step
        self._fresh.clear()

    def step_done(self, step: int) -> None:
        """A step succeeded: what it published stays."""
        self._last_done_step = step
        self._published.pop(step, None)

    def step_failed(self, step: int) -> None:
        """A step failed: what it and later ones published is not there, or was computed from what is not there."""
        for later in [s for s in self._published if s >= step]:
            for pool, block_id, block_hash in self._published.pop(later):
                pool.unpublish(block_id, block_hash)

    def forget_all(self) -> None:
        """The device lost its memory: nothing that any block held can be hit."""
        self._published.clear()
        others = [each.pool for each in (self.cross, self.images) if each is not None]
        for pool in (*self.pools, *others):
            pool.unpublish_all()

    # ---- figures and checks -----------------------------------------------------------------------------------
    def usage(self, live: Iterable[tuple[RequestBlocks, int]]) -> KVUsage:
        """What requests, given with their num_computed_tokens, hold and use. A shared block counts once."""
        used: list[dict[int, int]] = [{} for _ in self.pools]
        requests = list(live)
        for blocks, num_computed in requests:
            for policy, table, counts in zip(self.policies, blocks.tables, used, strict=True):
                for i, block_id in enumerate(table):
                    if block_id != NULL_BLOCK:
                        counts[block_id] = max(policy.num_used(i, num_computed), counts.get(block_id, 0))
        crosses = [blocks.cross for blocks, _ in requests if blocks.cross is not None]
        cross = {block_id: 0 for table in crosses for block_id in table.blocks}
        tokens = {table.blocks[0]: table.num_tokens for table in crosses if table.blocks}
        return KVUsage(
            slots_allocated=(sum(map(len, used)) + len(cross)) * self.block_size,
            slots_used=sum(sum(counts.values()) for counts in used) + sum(tokens.values()),
        )

    def check_integrity(self, live: Sequence[RequestBlocks]) -> None:
        """Assert the invariants, given the blocks of all running requests."""
        for index, pool in enumerate(self.pools):
            pool.check_integrity(blocks.tables[index] for blocks in live)
        if self.cross is not None:
            self.cross.pool.check_integrity(blocks.cross.blocks for blocks in live if blocks.cross is not None)
        if self.images is not None:
            tables = [blocks.images for blocks in live if blocks.images is not None]
            self.images.pool.check_integrity(held for table in tables for held in table.blocks)
        for blocks in live:
            assert blocks.cross is None or len(blocks.cross.blocks) == blocks.cross.num_blocks, "half an input"
            assert all(len(table) == blocks.num_blocks for table in blocks.tables), "tables of unequal length"
            assert blocks.num_told <= blocks.num_blocks and blocks.num_published <= blocks.num_blocks
            for policy, table, first in zip(self.policies, blocks.tables, blocks.first_kept, strict=True):
                policy.check(table, first)

    # ---- private ----------------------------------------------------------------------------------------------
    def _longest_hit(
        self,
        hashes: Sequence[bytes],
        length: int,
        policies: Sequence[FullPolicy],
        unwritten: Container[bytes] = frozenset(),
    ) -> int:
        """The fixed point of what groups have, at most `length` blocks."""
        while True:
            before = length
            for policy in policies:
                length = policy.cached_run(hashes, length, unwritten)
            if length == before or len(policies) == 1:
                return length

    def _set_return_at(self, blocks: RequestBlocks) -> None:
        times = (policy.return_at(first) for policy, first in zip(self.policies, blocks.first_kept, strict=True))
        blocks.return_at = min((time for time in times if time is not None), default=sys.maxsize)
