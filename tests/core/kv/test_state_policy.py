"""The state group: which states a request keeps, what later requests start behind, and what drafts cost."""

from headrace.core.kv.block_manager import BlockManager, RequestBlocks
from headrace.core.kv.groups import KVGroup
from headrace.core.kv.sizing import blocks_per_request

FULL = KVGroup(kind="full", layer_indices=(0,), heads=((1, 8),))
BS = 4


def state(num_lanes: int = 1, checkpoint_tokens: int = 16) -> KVGroup:
    return KVGroup(kind="state", layer_indices=(1,), num_lanes=num_lanes, checkpoint_tokens=checkpoint_tokens)


def make(*groups: KVGroup, num_blocks: int = 40, prefix_caching: bool = True) -> BlockManager:
    return BlockManager(
        groups=groups, num_blocks=[num_blocks] * len(groups), block_size=BS, prefix_caching=prefix_caching
    )


def admit(manager: BlockManager, token_ids: list[int], end: int = 0, step: int = 1) -> tuple[RequestBlocks, int]:
    """A request computed up to `end` (0: all of it), and its hit."""
    blocks, end = manager.new_request(), end or len(token_ids)
    hit = manager.find_hit(blocks, token_ids)
    assert manager.admit(blocks, hit=hit, end=end, num_tokens=len(token_ids), spare=0)
    manager.publish(blocks, token_ids, end, step)
    return blocks, hit


def taken(blocks: RequestBlocks, group: int = 0) -> list[int]:
    """The entries that hold a block."""
    return [index for index, block_id in enumerate(blocks.tables[group]) if block_id]


def test_a_prompt_keeps_its_end_its_last_full_block_and_checkpoints() -> None:
    manager = make(state())
    blocks, hit = admit(manager, list(range(42)))
    assert hit == 0
    assert taken(blocks) == [3, 7, 9, 10], "every 16 tokens, the last full block, and the end"
    manager.check_integrity([blocks])


def test_without_prefix_caching_only_the_end_is_kept() -> None:
    manager = make(state(), prefix_caching=False)
    blocks, _ = admit(manager, list(range(42)))
    assert taken(blocks) == [10]
    assert manager.grow(blocks, start=42, end=45)
    assert taken(blocks) == [10, 11]
    assert manager.grow(blocks, start=45, end=46)
    assert taken(blocks) == [11]


def test_checkpoints_are_given_up_while_the_pool_is_short() -> None:
    manager = make(state(), num_blocks=6)
    assert taken(admit(manager, list(range(42)))[0]) == [3, 10]


def test_the_same_prompt_starts_behind_its_last_full_block() -> None:
    manager = make(state())
    first, _ = admit(manager, list(range(40)))
    manager.begin_step()
    again, hit = admit(manager, list(range(40)))
    assert hit == 36
    assert again.tables[0][8] == first.tables[0][8] and taken(again) == [8, 9]
    manager.begin_step()
    third, hit = admit(manager, [*range(30), 99, 98, 97])
    assert hit == 16, "the last checkpoint before they part"
    manager.check_integrity([first, again, third])


def test_a_prefix_that_was_seen_twice_gets_a_state_of_its_own() -> None:
    """Where KV is shared further than states are, the second request leaves a state for the third."""
    manager = make(FULL, state())
    system = list(range(28))
    for tail, expected in (([100] * 5, 0), ([200] * 5, 16), ([300] * 5, 28)):
        _, hit = admit(manager, system + tail)
        manager.begin_step()
        assert hit == expected


def test_a_state_is_not_hit_in_the_step_that_writes_it() -> None:
    """KV may be: it is written before it is read. A request waits for the state rather than compute it again."""
    manager = make(FULL, state())
    manager.begin_step()
    admit(manager, list(range(20)))
    blocks = manager.new_request()
    assert (manager.find_hit(blocks, list(range(20))), blocks.hit_grows) == (0, True)
    manager.begin_step()
    assert (manager.find_hit(blocks, list(range(20))), blocks.hit_grows) == (16, False)
    manager.step_failed(1)
    assert manager.find_hit(blocks, list(range(20))) == 0 and not blocks.hit_grows


def test_an_answer_takes_three_blocks_however_long_it_is_and_keeps_the_last_full_one() -> None:
    manager = make(state(checkpoint_tokens=1000))
    tokens = list(range(10))
    blocks, _ = admit(manager, tokens)
    for end in range(11, 60):
        assert manager.grow(blocks, start=end - 1, end=end)
        tokens.append(end)
        manager.publish(blocks, tokens, end, end)
        assert len(taken(blocks)) <= 3
        manager.check_integrity([blocks])
    manager.release(blocks)
    manager.begin_step()
    _, hit = admit(manager, [*tokens, 7, 7])
    assert hit == 56, "the next turn starts behind the last full block"
    _, hit = admit(manager, [*tokens[:40], 7, 7])
    assert hit == 8, "states in the middle of an answer are not worth their blocks"


def test_states_of_all_drafts_are_kept_so_that_any_of_them_can_be_gone_back_to() -> None:
    manager = make(state(num_lanes=6))
    blocks, _ = admit(manager, list(range(7)))
    assert manager.grow(blocks, start=7, end=13)  # one token and five drafts: positions 7 to 12
    assert taken(blocks) == [0, 1, 2, 3]
    start = 7
    for num_right in (0, 2, 5, 1, 5, 5, 0):
        start += 1 + num_right
        assert manager.grow(blocks, start=start, end=start + 6)
        read, written = (start - 1) // BS, range(start // BS, (start + 5) // BS + 1)
        assert {read, *written} <= set(taken(blocks)) and len(taken(blocks)) <= 5
        manager.check_integrity([blocks])


def test_sizes() -> None:
    assert blocks_per_request(state(), 100_000, 16, 2048) == blocks_per_request(state(), 10, 16, 2048) == 4
    assert blocks_per_request(state(num_lanes=9), 10, 16, 2048) == 6
