"""One engine whose steps several threads and streams share."""

import collections
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager

from ..errors import RequestError
from ..stages import RequestOutput
from .engine import Engine


class SharedEngine:
    """Owns what is new of each request until whoever asked reads it; one call of the engine is made at a time.

    Invariant: while `_is_held`, the thread that has the lock is within a call of the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self.is_closed = False
        self._engine = engine
        self._lock = threading.RLock()  # garbage may be collected while it is held, streams among it
        self._latest: dict[str, RequestOutput] = {}
        self._dropped: collections.deque[str] = collections.deque()
        self._is_held = False
        self._is_torn = False
        _SHARED.add(self)

    def forked(self) -> None:
        """In the child of a fork: no other thread came along, and what one was in the midst of stays so."""
        self._lock = threading.RLock()
        self._is_torn = self._is_torn or self._is_held

    @property
    def engine(self) -> Engine:
        """What needs no turn. Raises RequestError if it is closed."""
        if self.is_closed:
            raise RequestError("this LLM is closed")
        if self._is_torn:
            raise RequestError(
                "this process was forked while another thread was in the midst of a step of this LLM",
                remedies=["load the LLM in this process", "fork while the LLM is idle"],
            )
        return self._engine

    @contextmanager
    def held(self) -> Iterator[Engine]:
        """The engine for one call; what is dropped in its midst is aborted behind it. Raises RequestError if it is
        closed, or for code that a step runs: a logits processor cannot take another."""
        with self._lock:
            engine = self.engine
            self._check_idle()
            self._is_held = True
            try:
                yield engine
            finally:
                self._is_held = False
                self.drop(())

    def news(self, mine: Set[str]) -> list[RequestOutput]:
        """What is new of these requests, after one step for all that are open if nothing is: several streams may be
        read in turns, and several threads may wait, each of which then takes steps for the others, too."""
        with self._lock:
            if mine.isdisjoint(self._latest):
                with self.held() as engine:
                    self._latest.update((output.request_id, output) for output in engine.step())
            return [self._latest.pop(request_id) for request_id in mine & self._latest.keys()]

    def drop(self, request_ids: Iterable[str]) -> None:
        """Abort these requests, whatever became of them; in the midst of a call of the engine behind that."""
        with self._lock:
            self._dropped.extend(request_ids)
            if self._is_held:
                return
            self._is_held = True
            try:
                while self._dropped:
                    request_id = self._dropped.popleft()
                    if not self.is_closed:
                        self._engine.abort(request_id)
                    self._latest.pop(request_id, None)
            finally:
                self._is_held = False

    def close(self) -> bool:
        """End all requests and free the engine. False if that was done before."""
        with self._lock:
            if not self._is_torn:
                self._check_idle()
            was_open, self.is_closed = not self.is_closed, True
            if was_open and not self._is_torn:
                self._engine.close()
            return was_open and not self._is_torn

    def _check_idle(self) -> None:
        if self._is_held:
            raise RequestError("this LLM is in the midst of a step, and what runs in it cannot use the LLM")


_SHARED: "weakref.WeakSet[SharedEngine]" = weakref.WeakSet()


def _forked() -> None:
    for each in _SHARED:
        each.forked()


os.register_at_fork(after_in_child=_forked)
