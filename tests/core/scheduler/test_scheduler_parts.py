"""The scheduler's small parts: seeds, order, limits, and the fast constructor."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.config import SchedulerConfig
from headrace.core.kv.block_manager import RequestBlocks
from headrace.core.sampling.params import SamplingParams
from headrace.core.scheduler.construct import fast_init
from headrace.core.scheduler.limits import MaxNumSeqs, Quarantine
from headrace.core.scheduler.policy import RequestQueue, find_policy
from headrace.core.scheduler.request import Request, resolve_seed
from headrace.core.stages import Delta, EngineRequest, Row


def make(name: str = "a", *, arrival: int = 0, priority: int = 0, policy: str = "fcfs") -> Request:
    request = Request(
        EngineRequest(
            request_id=name,
            prompt_token_ids=[1],
            sampling_params=SamplingParams(),
            arrival_s=0.0,
            priority=priority,
        ),
        arrival=arrival,
        seed=0,
        blocks=RequestBlocks(1, None, 10),
        max_model_len=10,
        eos_token_ids=(),
    )
    request.place = find_policy(SchedulerConfig(policy=policy))(request)
    return request


# ---- seeds --------------------------------------------------------------------------------------------------
def test_users_seed_is_mixed_as_splitmix64_and_folded() -> None:
    # The first output of the reference splitmix64 from state 0 is 0xE220A8397B1DCDAF.
    assert resolve_seed(0, 5, "any") == 0xE220A839 ^ 0x7B1DCDAF


@given(seed=st.integers(-(2**63), 2**64 - 1))
def test_users_seed_alone_decides(seed: int) -> None:
    assert resolve_seed(seed, 1, "a") == resolve_seed(seed, 2, "b") == resolve_seed(seed % 2**64, 1, "a")
    assert 0 <= resolve_seed(seed, 1, "a") < 2**32


def test_missing_seed_is_a_function_of_deployment_and_id() -> None:
    assert resolve_seed(None, 1, "a") == resolve_seed(None, 1, "a")
    seeds = {resolve_seed(None, deployment, f"r{i}") for deployment in range(10) for i in range(100)}
    assert len(seeds) == 1000, "of 1000 in 2^32, two are equal with a chance of 0.0001"


def test_near_seeds_differ_in_about_half_of_the_bits() -> None:
    flips = [(resolve_seed(i, 0, "") ^ resolve_seed(i + 1, 0, "")).bit_count() for i in range(1000)]
    assert 15 < sum(flips) / len(flips) < 17


# ---- order ----------------------------------------------------------------------------------------------------
@given(order=st.permutations(range(6)), removed=st.integers(0, 5), policy=st.sampled_from(["fcfs", "priority"]))
def test_queue_keeps_the_order_of_the_policy(order: list[int], removed: int, policy: str) -> None:
    requests = [make(str(i), arrival=i, priority=-(i % 3), policy=policy) for i in range(6)]
    queue = RequestQueue()
    for i in order:
        queue.add(requests[i])
    expected = [0, 1, 2, 3, 4, 5] if policy == "fcfs" else [2, 5, 1, 4, 0, 3]
    assert [request.arrival for request in queue] == expected
    queue.remove(requests[removed])
    assert [r.arrival for r in queue] == [i for i in expected if i != removed] and len(queue) == 5


# ---- limits -----------------------------------------------------------------------------------------------------
def test_max_num_seqs() -> None:
    queue = RequestQueue()
    assert MaxNumSeqs(1).admits(make(), queue)
    queue.add(make())
    assert not MaxNumSeqs(1).admits(make("b", arrival=1), queue)


def test_quarantine_keeps_suspects_in_small_company() -> None:
    limit, queue = Quarantine(), RequestQueue()
    suspect = make("suspect")
    suspect.max_company = 2
    assert limit.admits(suspect, queue)
    queue.add(suspect)
    assert limit.admits(make("b", arrival=1), queue)
    queue.add(make("b", arrival=1))
    assert not limit.admits(make("c", arrival=2), queue), "the suspect's company is complete"
    queue.remove(suspect)
    queue.add(make("c", arrival=2))
    assert not limit.admits(suspect, queue) and limit.admits(make("d", arrival=3), queue)


# ---- the fast constructor ---------------------------------------------------------------------------------------
def test_fast_constructor_makes_equal_frozen_records() -> None:
    values: dict[str, Any] = {
        "request_id": "a",
        "epoch": 1,
        "slot": 2,
        "num_tokens": 3,
        "num_draft_tokens": 0,
        "sample": True,
        "start": None,
        "new_blocks": ((),),
    }
    made = fast_init(Row)(**values)
    assert made == Row(**values) and hash(made) == hash(Row(**values))
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.slot = 3  # type: ignore[misc]
    assert fast_init(Delta)(request_id="a", token_ids=[1]) == Delta(request_id="a", token_ids=[1])
    with pytest.raises(TypeError, match="token_ids"):
        fast_init(Delta)(request_id="a")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unknown"):
        fast_init(Delta)(request_id="a", token_ids=[], unknown=1)  # type: ignore[call-arg]
