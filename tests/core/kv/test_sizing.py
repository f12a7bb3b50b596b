"""How bytes are shared among groups of KV blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.kv.groups import KVGroup
from headrace.core.kv.sizing import KVSize, blocks_per_request, size_kv
from headrace.core.platform import KVPlan

FULL = KVGroup(kind="full", layer_indices=(0,))
SLIDING = KVGroup(kind="sliding", layer_indices=(1,), window=64)
STATE = KVGroup(kind="state", layer_indices=(2,))
CROSS = KVGroup(kind="cross", layer_indices=(3,), num_tokens=100)
BATCH = 128
GROUPS = st.lists(st.sampled_from([FULL, SLIDING, STATE, CROSS]), min_size=1, max_size=4, unique_by=lambda g: g.kind)


def size(groups: list[KVGroup], block_bytes: list[int], num_bytes: int, length: int, max_num_seqs: int) -> KVSize:
    plan = KVPlan(block_size=16, block_bytes=tuple(block_bytes))
    return size_kv(
        num_bytes, groups, plan, max_model_len=length, max_num_batched_tokens=BATCH, max_num_seqs=max_num_seqs
    )


@given(GROUPS, st.data())
def test_requests_of_full_length_fit_and_no_byte_too_many_is_taken(
    groups: list[KVGroup], data: st.DataObject
) -> None:
    block_bytes = [data.draw(st.integers(1, 10_000)) for _ in groups]
    num_bytes, length = data.draw(st.integers(0, 10**8)), data.draw(st.integers(1, 10**6))
    max_num_seqs = data.draw(st.integers(1, 300))
    found = size(groups, block_bytes, num_bytes, length, max_num_seqs)
    assert found.total_bytes <= max(num_bytes, sum(block_bytes))
    assert 0 <= found.num_full_length <= max_num_seqs
    each = [blocks_per_request(group, length, 16, BATCH) for group in groups]
    for group, count, have in zip(groups, each, found.num_blocks, strict=True):
        assert have - 1 >= int(found.num_full_length) * count - 1, group
        assert have - 1 <= max_num_seqs * count
    needed = sum(count * one for count, one in zip(each, block_bytes, strict=True))
    assert (found.num_full_length >= 1 - 1e-9) == (num_bytes - sum(block_bytes) >= needed)


@pytest.mark.parametrize("fixed", [STATE, CROSS], ids=lambda group: group.kind)
def test_a_long_context_leaves_states_for_as_many_requests_as_run(fixed: KVGroup) -> None:
    """Seven requests of a million tokens fit; short ones need a state each, too, which are small beside that."""
    length = 1 << 20
    num_bytes = 7 * (length // 16) * 1000
    found = size([FULL, fixed], [1000, 2000], num_bytes, length, 256)
    assert found.num_blocks[1] == 1 + 256 * blocks_per_request(fixed, length, 16, BATCH)
    assert 6.9 < found.num_full_length < 7


def test_states_take_a_quarter_at_most_if_requests_are_long() -> None:
    found = size([FULL, STATE], [1000, 10_000], 10**8, 16 * 1000, 2000)
    assert 0.24 * 10**8 < found.num_blocks[1] * 10_000 <= 0.25 * 10**8 + 10_000
