"""Queue limits, the speed of the queue, and the order of keys and priorities."""

import pytest

from headrace.core.config import ServerConfig
from headrace.core.server.admission import Admission
from headrace.core.server.api_errors import ApiError
from headrace.core.server.generation import Completion, Generation


def request(name: str, key: str = "", tokens: int = 10, priority: int = 0, n: int = 1) -> Generation:
    """A request that is not queued yet."""
    made = Generation(name, key=key, on_done=lambda generation: None)
    prompt = [1] * tokens
    made.completions = [
        Completion(generation=made, index=i, prompt_token_ids=prompt, sampling_params={}, priority=priority)
        for i in range(n)
    ]
    return made


def order(admission: Admission) -> str:
    """Ids in the order in which completions go to the engine; none of them ends meanwhile."""
    found = ""
    while (completion := admission.pop()) is not None:
        found += completion.generation.id
    return found


def test_limits_by_requests_and_tokens() -> None:
    admission = Admission(ServerConfig(max_queue_requests=3, max_queue_tokens=100), num_keys=0, by_priority=False)
    admission.check("", 5000)  # one that is larger than the limit may run if nothing else waits
    first = request("a", tokens=60)
    admission.push(first)
    with pytest.raises(ApiError, match="60 prompt tokens wait") as error:
        admission.check("", 41)
    assert error.value.status == 429 and int(error.value.headers["Retry-After"]) > 0
    admission.check("", 40)
    for name in "bc":
        admission.push(request(name, tokens=1))
    with pytest.raises(ApiError, match="3 requests wait"):
        admission.check("", 1)
    assert admission.pop() is first.completions[0]
    admission.started(first)
    admission.check("", 1)
    assert (admission.num_waiting, admission.num_waiting_tokens) == (2, 2)


def test_what_ends_is_forgotten_wherever_it_is() -> None:
    admission = Admission(ServerConfig(), num_keys=0, by_priority=False)
    requests = [request(name, n=2) for name in "abc"]
    for generation in requests:
        admission.push(generation)
    popped = [admission.pop() for _ in range(3)]
    assert popped == [*requests[0].completions, requests[1].completions[0]] and admission.num_queued == 3
    for generation in requests:
        admission.ended(generation)
    assert (admission.num_waiting, admission.num_waiting_tokens, admission.num_queued) == (0, 0, 0)
    assert admission.pop() is None


def test_keys_share_the_engine() -> None:
    admission = Admission(ServerConfig(), num_keys=2, by_priority=False)
    for i in range(5):
        admission.push(request(str(i), key="greedy"))
    for name in "xy":
        admission.push(request(name, key="modest"))
    assert order(admission) == "0x1y234"


def test_one_request_for_many_completions_lets_other_keys_between() -> None:
    admission = Admission(ServerConfig(), num_keys=2, by_priority=False)
    many = request("0", key="greedy", n=5)
    admission.push(many)
    for name in "xy":
        admission.push(request(name, key="modest"))
    assert order(admission) == "0x0y000"
    # A completion that has left the engine counts no longer, though its request goes on.
    for completion in many.completions[:4]:
        admission.completed(completion)
    admission.push(request("z", key="modest"))
    admission.push(request("1", key="greedy"))
    assert order(admission) == "1z"


def test_one_key_cannot_fill_the_queue() -> None:
    admission = Admission(ServerConfig(max_queue_requests=4), num_keys=2, by_priority=False)
    for name in "ab":
        admission.push(request(name, key="greedy"))
    with pytest.raises(ApiError, match="with this key"):
        admission.check("greedy", 1)
    admission.check("modest", 1)


def test_priority_beats_the_order_of_keys() -> None:
    admission = Admission(ServerConfig(), num_keys=2, by_priority=True)
    for name, key, priority in (("a", "x", 5), ("b", "y", 1), ("c", "x", 0), ("d", "y", 9)):
        admission.push(request(name, key=key, priority=priority))
    assert order(admission) == "cbad"


def test_retry_after_follows_the_speed_of_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    admission = Admission(ServerConfig(max_queue_requests=1000), num_keys=0, by_priority=False)
    for i in range(10):  # one a second
        generation = request(str(i))
        admission.push(generation)
        admission.started(generation)
        now_s += 1.0
    for i in range(80):
        admission.push(request(str(i)))
    assert admission.retry_after_s() == 10  # an eighth of 80 requests, one a second
