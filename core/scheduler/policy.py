"""In which order requests are served, and the queue of those that wait."""

import bisect
from collections.abc import Callable, Iterator

from ..config import SchedulerConfig
from .request import Request

Policy = Callable[[Request], tuple[int, ...]]
"""From a request to its place: the smallest runs first, and the largest of those that run is preempted first.

A place is unique and does not change, so that a preempted request is back at the head, before all that came
after it, and the first of all requests is never preempted: it always gets on.
"""


def fcfs(request: Request) -> tuple[int, ...]:
    """First come, first served."""
    return (request.arrival,)


def priority(request: Request) -> tuple[int, ...]:
    """The smallest priority first; among equals the first that came."""
    return (request.priority, request.arrival)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority}


def find_policy(config: SchedulerConfig) -> Policy:
    """The policy that the configuration names (it has checked the name)."""
    return POLICIES[config.policy]


class RequestQueue:
    """Keeps `requests` in the order of their place; others only read it."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def add(self, request: Request) -> None:
        """Put a request in its place."""
        bisect.insort(self.requests, request, key=_place)

    def remove(self, request: Request) -> None:
        """Take a request out; it must be in."""
        index = bisect.bisect_left(self.requests, request.place, key=_place)
        assert self.requests[index] is request, request.request_id
        del self.requests[index]


def _place(request: Request) -> tuple[int, ...]:
    return request.place
