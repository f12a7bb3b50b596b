"""Requests whose prompts must be computed in one step, with and without a KV cache."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.clock import VirtualClock
from headrace.core.config import SchedulerConfig
from headrace.core.kv.block_manager import BlockManager
from headrace.core.kv.groups import KVGroup
from headrace.core.sampling.params import SamplingParams
from headrace.core.scheduler.scheduler import Scheduler
from headrace.core.stages import Delta, EngineRequest, Plan, StepResult

BUDGET, SEATS = 16, 4
FULL = KVGroup(kind="full", layer_indices=(0,), heads=((1, 8),))
SLIDING = KVGroup(kind="sliding", layer_indices=(1,), heads=((1, 8),), window=4)
GROUPS: tuple[tuple[KVGroup, ...], ...] = ((), (FULL,), (FULL, SLIDING))


def make_scheduler(groups: Sequence[KVGroup], num_blocks: int = 12, depth: int = 0) -> Scheduler:
    return Scheduler(
        config=SchedulerConfig(max_num_seqs=SEATS, max_num_batched_tokens=BUDGET),
        block_manager=BlockManager(groups=groups, num_blocks=[num_blocks] * len(groups), block_size=4),
        clock=VirtualClock(),
        depth=depth,
        max_model_len=100,
    )


def add(scheduler: Scheduler, name: str, length: int) -> None:
    scheduler.add(
        EngineRequest(
            request_id=name,
            prompt_token_ids=[7] * length,
            sampling_params=SamplingParams(max_tokens=0),
            arrival_s=0.0,
            pooling="mean",
            token_types=[1] * length,
            in_one_step=True,
        )
    )


def commit(scheduler: Scheduler, plan: Plan, error: str = "") -> list[Delta]:
    pooled = {} if error else {i: np.array([row.num_tokens], np.float32) for i, row in enumerate(plan.rows)}
    tokens: list[list[int]] = [] if error else [[] for _ in plan.rows]
    deltas = scheduler.commit(plan, StepResult(step=plan.step, token_ids=tokens, pooled=pooled, error=error))
    scheduler.check_integrity()
    return deltas


@settings(max_examples=60, deadline=None)
@given(
    groups=st.sampled_from(GROUPS),
    lengths=st.lists(st.integers(1, BUDGET), min_size=1, max_size=20),
    failing=st.integers(0, 6),
    depth=st.integers(0, 1),
)
def test_each_is_computed_whole(groups: tuple[KVGroup, ...], lengths: list[int], failing: int, depth: int) -> None:
    """Whatever the lengths, and whichever step fails: no part of a prompt is computed alone, and all end."""
    scheduler = make_scheduler(groups, depth=depth)
    for i, length in enumerate(lengths):
        add(scheduler, str(i), length)
    vectors: dict[str, float] = {}
    flying: list[Plan] = []
    for step in range(200):
        plan = scheduler.schedule() if len(flying) <= depth else None
        scheduler.check_integrity()
        if plan is not None:
            flying.append(plan)
            assert plan.num_tokens <= BUDGET and len(plan.rows) <= SEATS
            for row in plan.rows:
                assert (row.start, row.num_tokens, row.sample) == (0, lengths[int(row.request_id)], False)
            for new in plan.new:
                assert new.pooling == "mean" and list(new.token_types) == [1] * new.num_prompt_tokens
        if flying and (plan is None or len(flying) > depth):
            for delta in commit(scheduler, flying.pop(0), "boom" if step == failing else ""):
                assert delta.request_id not in vectors and delta.pooled is not None
                vectors[delta.request_id] = float(delta.pooled[0])
        if not scheduler.has_unfinished():
            break
    assert vectors == {str(i): float(length) for i, length in enumerate(lengths)}
    assert scheduler.num_hit_tokens == 0


def test_one_that_no_step_holds_ends_with_the_reason() -> None:
    for groups in GROUPS:
        scheduler = make_scheduler(groups)
        add(scheduler, "long", BUDGET + 1)
        add(scheduler, "short", 3)
        plan = scheduler.schedule()
        assert plan is not None and [row.request_id for row in plan.rows] == ["short"]
        long, short = sorted(commit(scheduler, plan), key=lambda delta: delta.request_id)
        assert long.finish_reason == "error" and short.pooled is not None
        assert "a prompt of 17 tokens must be computed in one step, which holds 16 tokens" in long.error
        assert not scheduler.has_unfinished()


def test_one_that_does_not_fit_behind_others_waits_for_the_next_step() -> None:
    scheduler = make_scheduler(())
    for name, length in (("a", 10), ("b", 7), ("c", 2)):
        add(scheduler, name, length)
    plan = scheduler.schedule()
    assert plan is not None and [row.request_id for row in plan.rows] == ["a"]  # c must not overtake b
    commit(scheduler, plan)
    plan = scheduler.schedule()
    assert plan is not None and [(row.request_id, row.num_tokens) for row in plan.rows] == [("b", 7), ("c", 2)]
