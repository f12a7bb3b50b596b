"""The scheduler decision by decision: what is in a step, who ends and why."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from headrace.core.clock import VirtualClock
from headrace.core.config import SchedulerConfig
from headrace.core.errors import RequestError
from headrace.core.kv.block_manager import BlockManager
from headrace.core.kv.groups import KVGroup
from headrace.core.models.rope import RopeRows
from headrace.core.sampling.params import SamplingParams
from headrace.core.scheduler.request import Request
from headrace.core.scheduler.scheduler import Scheduler
from headrace.core.stages import Delta, EngineRequest, Plan, StepResult, TokenLogprobs

EOS = 0


class Bench:
    """A scheduler and steps by hand. `token` answers for each sampling row."""

    def __init__(
        self,
        *,
        num_blocks: int = 100,
        max_num_seqs: int = 8,
        budget: int = 64,
        policy: str = "fcfs",
        max_model_len: int = 100,
        **options: Any,
    ) -> None:
        group = KVGroup(kind="full", layer_indices=(0,), heads=((1, 8),))
        self.clock = VirtualClock()
        self.scheduler = Scheduler(
            config=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, policy=policy),
            block_manager=BlockManager(groups=[group], num_blocks=[num_blocks], block_size=4),
            clock=self.clock,
            max_model_len=max_model_len,
            eos_token_ids=(EOS,),
            **options,
        )

    def add(
        self, name: str, prompt: Sequence[int] | int, *, priority: int = 0, salt: str = "", **params: Any
    ) -> None:
        prompt = [ord(name[0])] * prompt if isinstance(prompt, int) else prompt
        self.scheduler.add(
            EngineRequest(
                request_id=name,
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(**params),
                arrival_s=self.clock.now_s(),
                priority=priority,
                cache_salt=salt,
            )
        )

    def plan(self) -> Plan:
        plan = self.scheduler.schedule()
        assert plan is not None
        self.scheduler.check_integrity()
        return plan

    def commit(self, plan: Plan, tokens: dict[str, list[int]] | None = None, **result: Any) -> dict[str, Delta]:
        token_ids = [(tokens or {}).get(row.request_id, [7]) if row.sample else [] for row in plan.rows]
        deltas = self.scheduler.commit(plan, StepResult(step=plan.step, token_ids=token_ids, **result))
        self.scheduler.check_integrity()
        assert len({delta.request_id for delta in deltas}) == len(deltas)
        return {delta.request_id: delta for delta in deltas}

    def step(self, tokens: dict[str, list[int]] | None = None) -> dict[str, Delta]:
        return self.commit(self.plan(), tokens)

    def fail(self, plan: Plan, error: str = "boom") -> dict[str, Delta]:
        deltas = self.scheduler.commit(plan, StepResult(step=plan.step, token_ids=(), error=error))
        self.scheduler.check_integrity()
        return {delta.request_id: delta for delta in deltas}


def rows(plan: Plan) -> list[tuple[str, int | None, int, bool]]:
    return [(row.request_id, row.start, row.num_tokens, row.sample) for row in plan.rows]


# ---- what is in a step --------------------------------------------------------------------------------------
def test_prompts_are_cut_to_the_budget_and_running_requests_go_first() -> None:
    bench = Bench(budget=10)
    bench.add("a", 4)
    bench.add("b", 15)
    plan = bench.plan()
    assert rows(plan) == [("a", 0, 4, True), ("b", 0, 6, False)]
    bench.commit(plan)
    plan = bench.plan()
    assert rows(plan) == [("a", 4, 1, True), ("b", 6, 9, True)] and plan.new == []
    assert plan.num_tokens == 10
    bench.commit(plan)
    assert rows(bench.plan()) == [("a", 5, 1, True), ("b", 15, 1, True)]


def test_new_request_tells_the_runner_all_it_must_know() -> None:
    bench = Bench()
    bench.add("a", [5, 6, 7], seed=11, stop_token_ids=[9])
    bench.add("b", [5, 6, 8], ignore_eos=True)
    a, b = bench.plan().new
    assert (a.request_id, list(a.token_ids), a.num_prompt_tokens, a.num_computed_tokens) == ("a", [5, 6, 7], 3, 0)
    assert set(a.stop_token_ids) == {EOS, 9} and b.stop_token_ids == ()
    assert a.sampling_params.seed == 11 and 0 <= a.seed < 2**32
    assert a.slot != b.slot and a.epoch != b.epoch


def test_no_more_requests_than_slots() -> None:
    bench = Bench(max_num_seqs=2)
    for name in "abc":
        bench.add(name, 3, max_tokens=1)
    plan = bench.plan()
    assert [row[0] for row in rows(plan)] == ["a", "b"]
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (2, 1)
    bench.commit(plan)
    assert [row[0] for row in rows(bench.plan())] == ["c"]


def test_requests_that_arrive_together_share_their_prefix_in_one_step() -> None:
    bench, prompt = Bench(), list(range(1, 18))
    for name in "abc":
        bench.add(name, prompt)
    bench.add("d", prompt, salt="tenant")
    bench.add("e", prompt, prompt_logprobs=1)
    plan = bench.plan()
    assert [(n.request_id, n.num_computed_tokens) for n in plan.new] == [
        ("a", 0),
        ("b", 16),
        ("c", 16),
        ("d", 0),
        ("e", 0),
    ]
    assert plan.rows[1].new_blocks[0][:4] == plan.rows[0].new_blocks[0][:4]
    assert plan.rows[1].new_blocks[0][4] != plan.rows[0].new_blocks[0][4]
    assert bench.scheduler.num_hit_tokens == 32
    deltas = bench.commit(plan)
    assert [deltas[name].num_cached_tokens for name in "abcde"] == [0, 16, 16, 0, 0]


def test_a_prompt_with_another_rope_row_shares_nothing() -> None:
    bench, prompt = Bench(rope_rows=RopeRows(original_len=20, num_rows=2)), list(range(1, 18))
    bench.add("short", prompt)
    bench.add("long", [*prompt, 1, 2, 3, 4])
    bench.add("longer", [*prompt, 5, 6, 7, 8])
    assert [new.num_computed_tokens for new in bench.plan().new] == [0, 0, 16]


def test_priority_runs_small_numbers_first_and_preempts_large_ones() -> None:
    bench = Bench(policy="priority", num_blocks=5, max_num_seqs=2)
    bench.add("low", 4, priority=5)
    bench.add("high", 4, priority=1)
    bench.add("mid", 4, priority=3)
    plan = bench.plan()
    assert [row[0] for row in rows(plan)] == ["high", "mid"]
    for _ in range(5):
        bench.commit(plan)
        plan = bench.plan()
    # four blocks: when both need a third one, mid gives its blocks up
    assert [row[0] for row in rows(plan)] == ["high"] and bench.scheduler.num_preemptions == 1
    bench.commit(plan, {"high": [EOS]})
    plan = bench.plan()
    assert plan.new[0].request_id == "mid", "the preempted one comes before low"
    assert list(plan.new[0].token_ids) == [ord("m")] * 4 + [7] * 5 and plan.new[0].num_prompt_tokens == 4


def test_steps_ahead_count_tokens_in_flight() -> None:
    bench = Bench(depth=2)
    bench.add("a", 4, max_tokens=4)
    bench.add("p", 4, presence_penalty=1.0, max_tokens=2)  # its next row needs the last token on the host
    first, second, third = bench.plan(), bench.plan(), bench.plan()
    assert rows(first) == [("a", 0, 4, True), ("p", 0, 4, True)]
    assert rows(second) == rows(third) == [("a", None, 1, True)]
    with pytest.raises(AssertionError, match="3 steps in flight at depth 2"):
        bench.scheduler.schedule()
    bench.commit(first)
    fourth = bench.plan()
    assert rows(fourth) == [("a", None, 1, True), ("p", 4, 1, True)]
    bench.commit(second)
    assert bench.scheduler.schedule() is None, "two steps in flight end a, one ends p"
    bench.commit(third)
    deltas = bench.commit(fourth)
    assert {name: delta.finish_reason for name, delta in deltas.items()} == {"a": "length", "p": "length"}
    assert not bench.scheduler.has_unfinished()


def test_drafts_that_were_refused_are_computed_again() -> None:
    bench = Bench(num_draft_tokens=3)
    bench.add("a", 4, max_tokens=12)
    bench.step()
    plan = bench.plan()
    assert (plan.rows[0].num_tokens, plan.rows[0].num_draft_tokens) == (4, 3)
    delta = bench.commit(plan, {"a": [1, 2]})["a"]
    assert delta.token_ids == [1, 2]
    assert rows(plan := bench.plan()) == [("a", 6, 4, True)]
    assert bench.commit(plan, {"a": [3, 4, EOS, 5]})["a"].token_ids == [3, 4, EOS]


def test_drafts_stop_at_the_last_token() -> None:
    bench = Bench(num_draft_tokens=3)
    bench.add("a", 4, max_tokens=3)
    bench.step()
    plan = bench.plan()
    assert plan.rows[0].num_draft_tokens == 1, "two tokens are left: one draft and the one behind it"


# ---- who ends, and why ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("params", "tokens", "expected"),
    [
        ({}, [3, EOS], ("stop", None, 2)),
        ({"ignore_eos": True, "max_tokens": 3}, [3, EOS, 4], ("length", None, 3)),
        ({"stop_token_ids": [9]}, [3, 9], ("stop", 9, 2)),
        ({"stop_token_ids": [EOS]}, [EOS], ("stop", None, 1)),
        ({"stop_token_ids": [EOS], "ignore_eos": True}, [EOS], ("stop", EOS, 1)),
        ({"max_tokens": 2}, [3, 4], ("length", None, 2)),
        ({"max_tokens": 2}, [3, EOS], ("stop", None, 2)),
        ({"min_tokens": 3, "stop_token_ids": [9]}, [EOS, 9, 9], ("stop", 9, 3)),
        ({"max_tokens": None}, [3] * 6, ("length", None, 6)),
        ({"max_tokens": 50}, [3] * 6, ("length", None, 6)),
    ],
)
def test_end_of_a_request(
    params: dict[str, Any], tokens: list[int], expected: tuple[str, int | str | None, int]
) -> None:
    bench = Bench(max_model_len=10)
    bench.add("a", 4, **params)
    for token_id in tokens[:-1]:
        delta = bench.step({"a": [token_id]})["a"]
        assert (list(delta.token_ids), delta.finish_reason) == ([token_id], None)
    delta = bench.step({"a": [tokens[-1]]})["a"]
    assert (delta.finish_reason, delta.stop_reason) == expected[:2]
    assert not bench.scheduler.has_unfinished()


def test_prompt_only_request_ends_without_a_token() -> None:
    bench = Bench(budget=5)
    bench.add("a", 8, max_tokens=0, prompt_logprobs=0)
    plan = bench.plan()
    assert rows(plan) == [("a", 0, 5, False)]
    entry = TokenLogprobs(token_ids=[1], logprobs=[-1.0], ranks=[1], position=1)
    delta = bench.commit(plan, prompt_logprobs={0: [entry]})["a"]
    assert (list(delta.prompt_logprobs), delta.finish_reason, delta.token_ids) == ([entry], None, [])
    plan = bench.plan()
    assert rows(plan) == [("a", 5, 3, False)]
    assert bench.commit(plan)["a"].finish_reason == "length"


def test_logprobs_behind_a_stop_are_dropped() -> None:
    bench = Bench(num_draft_tokens=2)
    bench.add("a", 4)
    bench.step()
    entries = [TokenLogprobs(token_ids=[i], logprobs=[-1.0], ranks=[1], position=i) for i in range(3)]
    delta = bench.commit(bench.plan(), {"a": [1, EOS, 2]}, logprobs={0: entries})["a"]
    assert delta.token_ids == [1, EOS] and list(delta.logprobs) == entries[:2]


def test_prompt_that_never_fits_fails_with_the_numbers() -> None:
    bench = Bench(num_blocks=3)
    bench.add("fits", 7, max_tokens=2)
    bench.add("exactly", 8, max_tokens=1)
    bench.add("never", 8)
    seen: dict[str, Delta] = {}
    while bench.scheduler.has_unfinished():
        plan = bench.scheduler.schedule()
        seen |= bench.commit(plan) if plan else {d.request_id: d for d in bench.scheduler.take_deltas()}
    assert {name: delta.finish_reason for name, delta in seen.items()} == {
        "fits": "length",
        "exactly": "length",
        "never": "error",
    }
    assert "a prompt of 8 tokens does not fit in the KV cache, which holds 8 tokens" in seen["never"].error
    assert "--kv-memory" in seen["never"].error


def test_output_that_fills_the_pool_alone_ends_with_length() -> None:
    bench = Bench(num_blocks=3)
    bench.add("a", 5)
    output: list[int] = []
    deltas: dict[str, Delta] = {}
    while bench.scheduler.has_unfinished():
        plan = bench.scheduler.schedule()
        deltas = bench.commit(plan) if plan else {d.request_id: d for d in bench.scheduler.take_deltas()}
        output += deltas["a"].token_ids
    # KV of 8 tokens fits; the ninth was sampled from it.
    assert (len(output), deltas["a"].finish_reason, deltas["a"].error) == (4, "length", "")


def test_bad_requests_are_refused() -> None:
    bench = Bench(max_model_len=10)
    bench.add("a", 9)
    cases: list[tuple[str, int, dict[str, Any], str]] = [
        ("a", 3, {}, "request id 'a' is in use"),
        ("b", 0, {}, "the prompt is empty"),
        ("c", 10, {}, "a prompt of 10 tokens leaves no room for output within max_model_len 10"),
        ("d", 11, {"max_tokens": 0}, "a prompt of 11 tokens"),
    ]
    for name, prompt, params, match in cases:
        with pytest.raises(RequestError, match=match):
            bench.add(name, prompt, **params)
    bench.add("e", 10, max_tokens=0)
    assert bench.scheduler.num_waiting == 2


def test_finish_abort_and_fail() -> None:
    bench = Bench(max_num_seqs=2)
    for name in "abcd":
        bench.add(name, 3)
    bench.step()
    assert bench.scheduler.finish("a", "stop", "###") and not bench.scheduler.finish("a", "stop")
    assert bench.scheduler.abort("d") and not bench.scheduler.abort("unknown")
    assert bench.scheduler.fail("b", "poison") and not bench.scheduler.fail("b", "poison")
    bench.scheduler.check_integrity()
    deltas = bench.step()
    assert set(deltas) == {"b", "c"}
    assert (deltas["b"].finish_reason, deltas["b"].error) == ("error", "poison")


def test_id_used_again_does_not_get_results_of_its_past() -> None:
    bench = Bench(depth=1)
    bench.add("a", 3)
    old = bench.plan()
    bench.scheduler.abort("a")
    bench.add("a", 5)
    new = bench.plan()
    assert bench.commit(old, {"a": [1]}) == {}
    assert bench.commit(new, {"a": [2]})["a"].token_ids == [2]


def test_longest_wait_is_that_of_the_oldest_waiting_request() -> None:
    bench = Bench(max_num_seqs=1)
    assert bench.scheduler.longest_wait_s() == 0
    for name in "abc":
        bench.add(name, 3)
        bench.clock.advance(2.0)
    bench.step()
    assert bench.scheduler.longest_wait_s() == pytest.approx(4.0)


def test_another_limit_holds_requests_back() -> None:
    class AtMostOneLong:
        def admits(self, request: Request, running: Any) -> bool:
            return request.num_prompt_tokens < 10 or all(r.num_prompt_tokens < 10 for r in running)

    bench = Bench(limits=[AtMostOneLong()])
    for name, length in [("a", 12), ("b", 3), ("c", 12), ("d", 3)]:
        bench.add(name, length)
    assert [row[0] for row in rows(bench.plan())] == ["a", "b"]


# ---- failures ---------------------------------------------------------------------------------------------------
def drive(bench: Bench, is_bad: Callable[[Plan], bool], *, lose: bool = False) -> tuple[dict[str, Delta], int]:
    """Run to the end; steps for which `is_bad` fail, or lose the device. Last deltas, failed steps."""
    last: dict[str, Delta] = {}
    num_failed = 0
    for _ in range(1000):
        if not bench.scheduler.has_unfinished():
            return last, num_failed
        plan = bench.scheduler.schedule()
        if plan is None:
            deltas = bench.scheduler.take_deltas()
        elif not is_bad(plan):
            deltas = list(bench.commit(plan).values())
        elif lose:
            bench.scheduler.device_lost("gone")
            deltas = bench.scheduler.take_deltas()
            num_failed += 1
        else:
            deltas = list(bench.fail(plan).values())
            num_failed += 1
        bench.scheduler.check_integrity()
        last |= {delta.request_id: delta for delta in deltas if delta.finish_reason}
    raise AssertionError("livelock")


def test_one_failed_step_costs_nobody_anything() -> None:
    bench, seen = Bench(), list[int]()
    for name in "abc":
        bench.add(name, 6, max_tokens=3)

    def is_bad(plan: Plan) -> bool:
        seen.append(plan.step)
        return len(seen) == 2

    last, _ = drive(bench, is_bad)
    assert {name: delta.finish_reason for name, delta in last.items()} == dict.fromkeys("abc", "length")


@pytest.mark.parametrize("lose", [False, True])
def test_poison_request_ends_up_alone_and_fails(lose: bool) -> None:
    bench = Bench(max_num_seqs=32, budget=256, num_blocks=400)
    names = [f"{chr(97 + i)}{i}" for i in range(20)]
    for name in names:
        bench.add(name, 6, max_tokens=5)

    def is_bad(plan: Plan) -> bool:
        return any(row.request_id == names[13] for row in plan.rows)

    last, num_failed = drive(bench, is_bad, lose=lose)
    assert last.pop(names[13]).error == ("gone" if lose else "boom")
    assert {delta.finish_reason for delta in last.values()} == {"length"} and len(last) == 19
    assert num_failed <= 7, "20 suspects, 10, 5, 2, 1, and once more alone"


def test_a_device_that_never_works_fails_all_in_bounded_time() -> None:
    bench = Bench()
    for name in "abcdefgh":
        bench.add(name, 6)
    last, num_failed = drive(bench, lambda plan: True)
    assert {delta.error for delta in last.values()} == {"boom"} and len(last) == 8
    assert num_failed <= 8 * 4 + 4


def test_failed_step_drags_along_what_read_its_blocks() -> None:
    bench, prompt = Bench(depth=1, budget=17), list(range(1, 18))
    bench.add("a", prompt)
    first = bench.plan()
    bench.add("b", prompt)
    second = bench.plan()
    assert second.new[0].num_computed_tokens == 16, "b reads what the first step writes"
    bench.fail(first)
    assert bench.scheduler.num_running == 0
    assert bench.commit(second) == {}
    assert bench.plan().new[0].num_computed_tokens == 0, "nothing of the failed step can be hit"


@pytest.mark.parametrize("lose", [False, True])
def test_nothing_of_a_step_that_failed_its_request_for_good_can_be_hit(lose: bool) -> None:
    bench, prompt = Bench(), list(range(1, 18))
    bench.add("a", prompt)
    last, _ = drive(bench, lambda plan: True, lose=lose)
    assert last["a"].finish_reason == "error"
    bench.add("b", prompt)
    assert bench.plan().new[0].num_computed_tokens == 0


def test_lost_device_also_takes_what_requests_outside_of_the_step_had() -> None:
    bench = Bench(num_draft_tokens=3, budget=4)
    for name in "abc":
        bench.add(name, 1)
    bench.step()
    assert [row[0] for row in rows(bench.plan())] == ["a"], "its drafts use up the budget"
    bench.scheduler.device_lost("gone")
    bench.scheduler.check_integrity()
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (0, 3)
    plan = bench.plan()
    assert [new.request_id for new in plan.new] == ["a"] and plan.new[0].num_computed_tokens == 0


def test_the_last_block_of_a_finished_request_can_be_hit() -> None:
    bench = Bench(num_draft_tokens=3)
    bench.add("a", 4)
    bench.step()
    assert bench.step({"a": [1, 2, 3, EOS]})["a"].finish_reason == "stop"
    bench.add("b", [*[ord("a")] * 4, 7, 1, 2, 3, EOS, 9])  # a chat's next turn
    assert bench.plan().new[0].num_computed_tokens == 8
