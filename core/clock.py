"""Time as the engine sees it: real, or virtual in tests and simulations."""

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock."""

    def now_s(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        ...


class MonotonicClock:
    """The machine's own clock."""

    def now_s(self) -> float:
        """Seconds of time.monotonic()."""
        return time.monotonic()


class VirtualClock:
    """A clock that stands still until told."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        """The time that was set."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        assert seconds >= 0, seconds
        self._now_s += seconds
