"""The step loop: steps in flight, their order, and what each kind of failure leads to."""

from collections import deque
from concurrent.futures import Future
from typing import Any

import pytest

from headrace.core.clock import VirtualClock
from headrace.core.config import SchedulerConfig
from headrace.core.engine.loop import StepLoop
from headrace.core.errors import DeviceLost, OutOfMemory
from headrace.core.kv.block_manager import BlockManager
from headrace.core.kv.groups import KVGroup
from headrace.core.sampling.params import SamplingParams
from headrace.core.scheduler.scheduler import Scheduler
from headrace.core.stages import Delta, EngineRequest, Plan, StepResult


class ScriptedExecutor:
    """Samples token 7 for each sampling row; `trouble` holds what the next steps raise, None for nothing.

    An exception in `at_submit` is raised by submit itself.
    """

    def __init__(self) -> None:
        self.trouble: deque[BaseException | str | None] = deque()
        self.at_submit: deque[BaseException | None] = deque()
        self.submitted: list[int] = []
        self.num_restarts = 0
        self.restart_error: Exception | None = None

    def start(self) -> None: ...
    def close(self) -> None: ...
    def health(self) -> str:
        return ""

    def call(self, name: str, *args: Any) -> Any:
        raise NotImplementedError(name)

    def restart(self) -> None:
        self.num_restarts += 1
        if self.restart_error is not None:
            raise self.restart_error

    def submit(self, plan: Plan) -> "Future[StepResult]":
        error = self.at_submit.popleft() if self.at_submit else None
        if error is not None:
            raise error
        self.submitted.append(plan.step)
        future: Future[StepResult] = Future()
        trouble = self.trouble.popleft() if self.trouble else None
        if isinstance(trouble, BaseException):
            future.set_exception(trouble)
        elif trouble is not None:
            future.set_result(StepResult(step=plan.step, token_ids=(), error=trouble))
        else:
            token_ids = [[7] if row.sample else [] for row in plan.rows]
            future.set_result(StepResult(step=plan.step, token_ids=token_ids))
        return future


def make(depth: int = 0, names: str = "ab", max_tokens: int = 4) -> tuple[StepLoop, Scheduler, ScriptedExecutor]:
    group = KVGroup(kind="full", layer_indices=(0,), heads=((1, 8),))
    scheduler = Scheduler(
        config=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        block_manager=BlockManager(groups=[group], num_blocks=[50], block_size=4),
        clock=VirtualClock(),
        depth=depth,
        max_model_len=100,
    )
    for name in names:
        scheduler.add(
            EngineRequest(
                request_id=name,
                prompt_token_ids=[1, 2, 3],
                sampling_params=SamplingParams(max_tokens=max_tokens),
                arrival_s=0.0,
            )
        )
    executor = ScriptedExecutor()
    return StepLoop(scheduler, executor, depth), scheduler, executor


def run(loop: StepLoop, scheduler: Scheduler) -> dict[str, list[Delta]]:
    deltas: dict[str, list[Delta]] = {}
    for _ in range(200):
        if not scheduler.has_unfinished():
            return deltas
        for delta in loop.step():
            deltas.setdefault(delta.request_id, []).append(delta)
        scheduler.check_integrity()
    raise AssertionError("livelock")


def outputs(deltas: dict[str, list[Delta]]) -> dict[str, tuple[list[int], str | None]]:
    return {
        name: ([token_id for delta in each for token_id in delta.token_ids], each[-1].finish_reason)
        for name, each in deltas.items()
    }


ALL = {"a": ([7] * 4, "length"), "b": ([7] * 4, "length")}


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_as_many_steps_in_flight_as_the_device_allows(depth: int) -> None:
    loop, scheduler, executor = make(depth)
    for _ in range(depth):
        assert loop.step() == []
    assert len(executor.submitted) == depth
    assert {delta.request_id for delta in loop.step()} == {"a", "b"}
    assert len(executor.submitted) == depth + 1
    assert {name: len(token_ids) for name, (token_ids, _) in outputs(run(loop, scheduler)).items()} == {
        "a": 3,
        "b": 3,
    }
    assert executor.submitted == sorted(executor.submitted)
    assert loop.step() == []


def test_newly_scheduled_names_the_requests_of_the_latest_step() -> None:
    loop, _, _ = make()
    assert list(loop.newly_scheduled()) == []
    loop.step()
    assert list(loop.newly_scheduled()) == ["a", "b"]
    loop.step()
    assert list(loop.newly_scheduled()) == []


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("trouble", ["the step failed", OutOfMemory("no memory for the step")])
def test_failed_step_is_run_again_without_a_restart(depth: int, trouble: str | OutOfMemory) -> None:
    loop, scheduler, executor = make(depth)
    executor.trouble.extend([None, trouble])
    assert outputs(run(loop, scheduler)) == ALL
    assert executor.num_restarts == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_lost_device_is_restarted_and_all_is_computed_again(depth: int) -> None:
    loop, scheduler, executor = make(depth)
    executor.trouble.extend([None, DeviceLost("it fell off the bus")])
    assert outputs(run(loop, scheduler)) == ALL
    assert executor.num_restarts == 1


def test_errors_that_submit_raises_are_those_of_the_step() -> None:
    loop, scheduler, executor = make()
    executor.at_submit.extend([None, OutOfMemory("no memory"), None, DeviceLost("gone")])
    assert outputs(run(loop, scheduler)) == ALL
    assert executor.num_restarts == 1


def test_request_that_always_fails_gets_the_error_and_the_loop_goes_on() -> None:
    loop, scheduler, executor = make(names="a")
    executor.trouble.extend([OutOfMemory("no memory for the step")] * 2)
    deltas = run(loop, scheduler)
    assert deltas["a"][-1].finish_reason == "error" and "no memory for the step" in deltas["a"][-1].error
    assert loop.step() == []


def test_restart_that_fails_is_the_callers_problem_and_loses_no_request() -> None:
    loop, scheduler, executor = make()
    executor.trouble.append(DeviceLost("gone"))
    executor.restart_error = DeviceLost("still gone")
    with pytest.raises(DeviceLost, match="still gone"):
        loop.step()
    assert scheduler.num_waiting == 2
    executor.restart_error = None
    assert outputs(run(loop, scheduler)) == ALL


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("at_submit", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError("a bug")])
def test_interrupted_step_passes_through_and_can_be_continued(
    depth: int, at_submit: bool, error: BaseException
) -> None:
    loop, scheduler, executor = make(depth)
    (executor.at_submit if at_submit else executor.trouble).extend([None, error])
    first: list[Delta] = []
    with pytest.raises(type(error)):
        for _ in range(5):
            first += loop.step()
    scheduler.check_integrity()
    deltas: dict[str, list[Delta]] = {}
    for delta in first:
        deltas.setdefault(delta.request_id, []).append(delta)
    for name, each in run(loop, scheduler).items():
        deltas.setdefault(name, []).extend(each)
    assert outputs(deltas) == ALL


def test_delta_of_a_request_that_never_ran_comes_without_a_step() -> None:
    loop, scheduler, _ = make(names="a")
    scheduler.fail("a", "cancelled by the operator")
    assert [(d.request_id, d.error) for d in loop.step()] == [("a", "cancelled by the operator")]
    assert not scheduler.has_unfinished()
