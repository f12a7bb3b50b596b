"""What the page is fed with: the engine's steps and the server's figures, for as long as somebody listens."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

import msgspec

from .api_errors import ApiError
from .frames import KVGroupTrace, StepTrace

_MAX_LISTENERS = 32
_MAX_STEPS = 256
"""In one event; a listener that is slower than that misses the oldest."""
_GATHER_S = 0.1
"""Steps of so long go into one event."""
_HEARTBEAT_S = 1.0
"""Without steps there is still an event after so long, with the figures."""


class FeedStep(msgspec.Struct, kw_only=True):
    """One step. rows: request id, tokens, whether they are of its prompt."""

    step: int
    ms: float
    rows: list[tuple[str, int, bool]]


class FeedGroup(msgspec.Struct, kw_only=True):
    """The blocks of one KV group, numbered from 1; ids as runs: first, count, first, count, ..."""

    blocks: int
    held: dict[str, list[int]]
    cached: list[int]


class FeedEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What happened since the last event."""

    state: str
    """"" if requests can be answered, else why not"""
    figures: dict[str, float]
    steps: list[FeedStep] = []
    missed: int = 0
    """steps that are not told"""
    kv: list[FeedGroup] | None = None
    """left out: as before"""


class StepFeed:
    """Owns the listeners. `watch` is called with True when the first one comes and with False when the last one
    is gone, so that the engine describes its steps only then."""

    def __init__(self, watch: Callable[[bool], None], figures: Callable[[], tuple[str, dict[str, float]]]) -> None:
        """figures: the server's state (see FeedEvent) and figures of this moment."""
        self._watch = watch
        self._figures = figures
        self._listeners: set[Listener] = set()

    @property
    def is_watched(self) -> bool:
        """True while somebody listens."""
        return bool(self._listeners)

    def listen(self) -> "Listener":
        """A new listener, to be removed when it is gone. Raises ApiError if there are too many."""
        if len(self._listeners) >= _MAX_LISTENERS:
            raise ApiError(
                503,
                f"{_MAX_LISTENERS} pages watch already",
                code="too_many_listeners",
                headers={"Retry-After": "10"},
            )
        listener = Listener(self._figures)
        self._listeners.add(listener)
        if len(self._listeners) == 1:
            self._watch(True)
        return listener

    def remove(self, listener: "Listener") -> None:
        """End a listener's events; may be called twice."""
        listener.close()
        if listener in self._listeners:
            self._listeners.remove(listener)
            if not self._listeners:
                self._watch(False)

    def push(self, trace: StepTrace) -> None:
        """Tell all listeners."""
        for listener in self._listeners:
            listener.push(trace)

    def close(self) -> None:
        """End all events."""
        for listener in list(self._listeners):
            self.remove(listener)


class Listener:
    """Keeps what one page has not been told yet, bounded."""

    def __init__(self, figures: Callable[[], tuple[str, dict[str, float]]]) -> None:
        self._figures = figures
        self._steps: deque[StepTrace] = deque(maxlen=_MAX_STEPS)
        self._kv: list[KVGroupTrace] | None = None
        self._num_missed = 0
        self._is_closed = False
        self._news = asyncio.Event()

    def push(self, trace: StepTrace) -> None:
        """Take a step."""
        if trace.kv is not None:
            self._kv = trace.kv
        if trace.step >= 0:
            self._num_missed += len(self._steps) == _MAX_STEPS
            self._steps.append(trace)
        self._news.set()

    def close(self) -> None:
        """End `events`."""
        self._is_closed = True
        self._news.set()

    async def events(self) -> AsyncIterator[FeedEvent]:
        """The events, until it is closed: the figures at once, then what is new, gathered for a while."""
        while not self._is_closed:
            yield self._event()
            try:
                async with asyncio.timeout(_HEARTBEAT_S):
                    await self._news.wait()
            except TimeoutError:
                continue
            if not self._is_closed:
                await asyncio.sleep(_GATHER_S)
            self._news.clear()

    def _event(self) -> FeedEvent:
        state, figures = self._figures()
        event = FeedEvent(state=state, figures=figures, missed=self._num_missed)
        event.steps = [
            FeedStep(
                step=step.step,
                ms=round(1e3 * step.seconds, 3),
                rows=[(row.request_id, row.num_tokens, row.is_prefill) for row in step.rows],
            )
            for step in self._steps
        ]
        if self._kv is not None:
            event.kv = [FeedGroup(blocks=g.num_blocks, held=g.held, cached=g.cached) for g in self._kv]
        self._steps.clear()
        self._kv, self._num_missed = None, 0
        return event
