"""How many KV blocks each group gets out of a number of bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..platform import KVPlan
from .groups import KVGroup

_FIXED = ("state", "cross")
"""Kinds of groups that hold as much for a short request as for a long one."""
_FIXED_SHARE = 1 / 4


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSize:
    """num_blocks: per group, the null block included. total_bytes: of all of them."""

    num_blocks: tuple[int, ...]
    total_bytes: int
    num_full_length: float
    """requests of max_model_len tokens that fit at the same time"""


def blocks_per_request(group: KVGroup, num_tokens: int, block_size: int, max_num_batched_tokens: int) -> int:
    """Blocks that one request of `num_tokens` holds at most at one time.

    A sliding group keeps the window before a step's first token, and the step's own tokens. A state group keeps the
    state before a step, the one after it and the last at a block's end, besides those of drafts; one more is for
    a checkpoint of the prompt. A cross group keeps an encoder's whole output, however long the request.
    """
    if group.kind == "cross":
        return -(-group.num_tokens // block_size)
    if group.kind == "state":
        return 4 + (-(-2 * group.num_lanes // block_size) if group.num_lanes > 1 else 0)
    if group.kind == "sliding":
        num_tokens = min(num_tokens, group.window + max_num_batched_tokens)
        return -(-num_tokens // block_size) + 1
    return -(-num_tokens // block_size)


def request_bytes(groups: Sequence[KVGroup], plan: KVPlan, num_tokens: int, max_num_batched_tokens: int) -> int:
    """Bytes of KV cache that one request of `num_tokens` needs."""
    return sum(
        blocks_per_request(group, num_tokens, plan.block_size, max_num_batched_tokens) * size
        for group, size in zip(groups, plan.block_bytes, strict=True)
    )


def size_kv(
    num_bytes: int,
    groups: Sequence[KVGroup],
    plan: KVPlan,
    *,
    max_model_len: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
) -> KVSize:
    """Share `num_bytes` so that requests of full length exhaust all groups at the same time.

    Groups whose share does not grow with the length serve more and shorter requests, too, as far as a quarter of the
    bytes suffices: else a long context would leave few states.

    Never more than `max_num_seqs` such requests need; each group gets its null block besides.
    """
    if not groups:
        return KVSize(num_blocks=(), total_bytes=0, num_full_length=float(max_num_seqs))
    counts = [blocks_per_request(group, max_model_len, plan.block_size, max_num_batched_tokens) for group in groups]
    is_fixed = [group.kind in _FIXED for group in groups]
    fixed, growing = (
        sum(n * size for n, size, flag in zip(counts, plan.block_bytes, is_fixed, strict=True) if flag is which)
        for which in (True, False)
    )
    usable = max(num_bytes - sum(plan.block_bytes), 0)
    num_requests = num_short = min(float(max_num_seqs), usable / (fixed + growing))
    if fixed and growing:
        share = min(usable * _FIXED_SHARE, usable - growing)
        num_short = max(num_requests, min(float(max_num_seqs), share / fixed))
        num_requests = min(num_requests, (usable - num_short * fixed) / growing)
    num_blocks = tuple(
        1 + int((num_short if flag else num_requests) * n) for n, flag in zip(counts, is_fixed, strict=True)
    )
    total = sum(n * size for n, size in zip(num_blocks, plan.block_bytes, strict=True))
    return KVSize(num_blocks=num_blocks, total_bytes=total, num_full_length=num_requests)
