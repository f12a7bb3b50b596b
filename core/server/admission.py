"""Who may queue, and who is next: limits by requests and tokens, and a fair share for every key."""

import math
import time
from collections import Counter, deque

from ..config import ServerConfig
from .api_errors import ApiError
from .generation import Completion, Generation

_HISTORY = 64
"""First tokens that the speed of the queue is measured over."""
_MAX_RETRY_S = 120


class Admission:
    """Owns the completions that no engine has yet, a queue of requests for each key, and counts the requests that
    have no first token.

    The key with the fewest completions in the engine is next, among equals the one whose request came first. A
    request with many completions is handed out one by one, so that it does not hold up other keys. With
    `by_priority` the smallest priority is first, whatever the key.
    """

    def __init__(self, config: ServerConfig, *, num_keys: int, by_priority: bool) -> None:
        self._config = config
        self._num_keys = num_keys
        self._by_priority = by_priority
        self._queues: dict[str, list[Generation]] = {}
        self._num_taken: dict[Generation, int] = {}  # of each request that is in a queue
        self._in_engine: set[Completion] = set()
        self._in_engine_of_key: Counter[str] = Counter()
        self._waiting: dict[Generation, int] = {}
        self._waiting_of_key: Counter[str] = Counter()
        self._started: deque[float] = deque(maxlen=_HISTORY)
        self.num_waiting_tokens = 0

    @property
    def num_waiting(self) -> int:
        """Requests without a first token."""
        return len(self._waiting)

    @property
    def num_queued(self) -> int:
        """Completions that no engine has yet."""
        return sum(len(generation.completions) - taken for generation, taken in self._num_taken.items())

    def check(self, key: str, num_tokens: int) -> None:
        """Raise ApiError 429 with Retry-After if there is no room for a request of so many prompt tokens."""
        config = self._config
        if self.num_waiting >= config.max_queue_requests:
            self._refuse(f"the queue is full: {self.num_waiting} requests wait", "queue_full")
        if self._waiting and self.num_waiting_tokens + num_tokens > config.max_queue_tokens:
            self._refuse(f"the queue is full: {self.num_waiting_tokens} prompt tokens wait", "queue_full")
        share = max(1, config.max_queue_requests // 2)
        if self._num_keys > 1 and self._waiting_of_key[key] >= share:
            self._refuse(f"{self._waiting_of_key[key]} requests with this key wait already", "key_queue_full")

    def push(self, generation: Generation) -> None:
        """Queue a request that was checked."""
        self._queues.setdefault(generation.key, []).append(generation)
        if self._by_priority:
            self._queues[generation.key].sort(key=_rank)
        self._num_taken[generation] = 0
        tokens = generation.num_prompt_tokens
        self._waiting[generation] = tokens
        self._waiting_of_key[generation.key] += 1
        self.num_waiting_tokens += tokens

    def pop(self) -> Completion | None:
        """The next completion for the engine, or None."""
        if not self._queues:
            return None
        if self._by_priority:
            key = min(self._queues, key=lambda key: _rank(self._queues[key][0]))
        else:
            key = min(self._queues, key=lambda key: (self._in_engine_of_key[key], self._queues[key][0].arrival_s))
        generation = self._queues[key][0]
        completion = generation.completions[self._num_taken[generation]]
        self._num_taken[generation] += 1
        if self._num_taken[generation] == len(generation.completions):
            self._leave_queue(generation)
        self._in_engine.add(completion)
        self._in_engine_of_key[key] += 1
        return completion

    def started(self, generation: Generation) -> None:
        """A request's first token came."""
        if self._forget(generation):
            self._started.append(time.monotonic())

    def completed(self, completion: Completion) -> None:
        """A completion has left the engine."""
        if completion not in self._in_engine:
            return
        self._in_engine.remove(completion)
        key = completion.generation.key
        self._in_engine_of_key[key] -= 1
        if not self._in_engine_of_key[key]:
            del self._in_engine_of_key[key]

    def ended(self, generation: Generation) -> None:
        """A request is done, wherever it was."""
        self._forget(generation)
        for completion in generation.completions:
            self.completed(completion)
        if generation in self._num_taken:
            self._leave_queue(generation)

    def retry_after_s(self) -> int:
        """When it is worth trying again: an eighth of the queue has then moved, at the speed it has now."""
        if len(self._started) < 2:
            return 5
        elapsed_s = max(1e-3, time.monotonic() - self._started[0])
        wait_s = max(1.0, self.num_waiting / 8) * elapsed_s / len(self._started)
        return max(1, min(_MAX_RETRY_S, math.ceil(wait_s)))

    def _leave_queue(self, generation: Generation) -> None:
        del self._num_taken[generation]
        queue = self._queues[generation.key]
        queue.remove(generation)
        if not queue:
            del self._queues[generation.key]

    def _forget(self, generation: Generation) -> bool:
        tokens = self._waiting.pop(generation, None)
        if tokens is None:
            return False
        self.num_waiting_tokens -= tokens
        self._waiting_of_key[generation.key] -= 1
        if not self._waiting_of_key[generation.key]:
            del self._waiting_of_key[generation.key]
        return True

    def _refuse(self, reason: str, code: str) -> None:
        seconds = self.retry_after_s()
        raise ApiError(429, f"{reason}; try again in {seconds} s", code=code, headers={"Retry-After": str(seconds)})


def _rank(generation: Generation) -> tuple[int, float]:
    return generation.completions[0].priority, generation.arrival_s
