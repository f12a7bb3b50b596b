"""Rows that need their last token on the host never run ahead, whatever runs beside them and at whatever depth."""

from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.clock import VirtualClock
from headrace.core.config import SchedulerConfig
from headrace.core.engine.loop import StepLoop
from headrace.core.kv.block_manager import BlockManager
from headrace.core.kv.groups import KVGroup
from headrace.core.sampling.params import SamplingParams
from headrace.core.scheduler.scheduler import Scheduler
from headrace.core.stages import Delta, EngineRequest, Plan, StepResult
from headrace.core.structured.params import StructuredOutputParams

HOST_BOUND: list[dict[str, Any]] = [
    {"structured_output": StructuredOutputParams(kind="json_object")},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -0.5},
    {"repetition_penalty": 1.1},
    {"bad_words": ["x"]},
    {"logits_processors": ["p"]},
    {"stop": ["x"]},
]
FREE: list[dict[str, Any]] = [{}, {"temperature": 0}, {"min_tokens": 3}, {"logit_bias": {1: 1.0}}, {"logprobs": 1}]


class LateDevice:
    """Gives a step's result only when it is asked for, one after another; notes what each row was built from."""

    def __init__(self, host_bound: set[str], fails: set[int]) -> None:
        self.host_bound = host_bound
        self.fails = fails
        self.known: dict[str, int] = {}
        self.in_flight: dict[str, int] = {}
        self.ran_ahead = False

    def start(self) -> None: ...
    def close(self) -> None: ...
    def restart(self) -> None: ...
    def health(self) -> str:
        return ""

    def call(self, name: str, *args: Any) -> Any:
        raise NotImplementedError(name)

    def submit(self, plan: Plan) -> "Future[StepResult]":
        device = self
        for row in plan.rows:
            pending = self.in_flight.get(row.request_id, 0)
            if row.request_id in self.host_bound:
                assert not pending, f"{row.request_id} runs ahead of the token that its row is built from"
                assert row.num_draft_tokens == 0 and row.start is not None
            self.ran_ahead = self.ran_ahead or bool(pending)
            if row.sample:
                self.in_flight[row.request_id] = pending + 1

        class Late(Future[StepResult]):
            def result(self, timeout: float | None = None) -> StepResult:
                for row in plan.rows:
                    device.in_flight[row.request_id] = device.in_flight.get(row.request_id, 0) - row.sample
                token_ids = [[7] * row.sample for row in plan.rows]
                failed = {
                    index: "cannot go on"
                    for index, row in enumerate(plan.rows)
                    if row.sample and plan.step in device.fails and row.request_id in device.host_bound
                }
                return StepResult(step=plan.step, token_ids=token_ids, failed=failed)

        return Late()


def run(
    requests: list[dict[str, Any]], depth: int, num_drafts: int = 0, fails: set[int] | None = None
) -> tuple[list[Delta], LateDevice]:
    group = KVGroup(kind="full", layer_indices=(0,), heads=((1, 8),))
    scheduler = Scheduler(
        config=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16),
        block_manager=BlockManager(groups=[group], num_blocks=[30], block_size=4),
        clock=VirtualClock(),
        depth=depth,
        num_draft_tokens=num_drafts,
        max_model_len=60,
        eos_token_ids=[0],
    )
    names = [str(n) for n in range(len(requests))]
    device = LateDevice({n for n, more in zip(names, requests, strict=True) if more in HOST_BOUND}, fails or set())
    loop = StepLoop(scheduler, device, depth)
    for name, more in zip(names, requests, strict=True):
        params = SamplingParams(max_tokens=8, **more)
        scheduler.add(
            EngineRequest(request_id=name, prompt_token_ids=[1, 2, 3], sampling_params=params, arrival_s=0.0)
        )
    deltas: list[Delta] = []
    for _ in range(500):
        deltas += loop.step()
        scheduler.check_integrity()
        if not scheduler.has_unfinished():
            return deltas, device
    raise AssertionError("requests do not finish")


@settings(max_examples=60)
@given(st.lists(st.sampled_from(HOST_BOUND + FREE), min_size=1, max_size=6), st.integers(0, 3))
def test_host_bound_rows_wait_and_all_finish(requests: list[dict[str, Any]], depth: int) -> None:
    deltas, device = run(requests, depth)
    for n, more in enumerate(requests):
        tokens = [token for delta in deltas if delta.request_id == str(n) for token in delta.token_ids]
        assert tokens == [7] * 8, more
    assert device.ran_ahead == (depth > 0 and any(more in FREE for more in requests))


@pytest.mark.parametrize("more", HOST_BOUND, ids=lambda more: next(iter(more)))
def test_host_bound_rows_get_no_drafts(more: dict[str, Any]) -> None:
    deltas, _ = run([more], depth=1, num_drafts=3)
    assert sum(len(delta.token_ids) for delta in deltas) == 8


@pytest.mark.parametrize("depth", [0, 2])
def test_a_row_that_cannot_go_on_ends_with_its_reason(depth: int) -> None:
    deltas, _ = run([HOST_BOUND[0], {}, HOST_BOUND[1]], depth, fails={3, 4, 5, 6})
    ends = {delta.request_id: (delta.finish_reason, delta.error) for delta in deltas if delta.finish_reason}
    assert ends["1"] == ("length", "")
    assert {ends["0"][0], ends["2"][0]} <= {"error", "length"} and "error" in {ends["0"][0], ends["2"][0]}
    assert all(error == "cannot go on" for reason, error in ends.values() if reason == "error")
