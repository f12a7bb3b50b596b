"""Responses that clients may come back to, kept in memory within a limit."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..api_errors import ApiError
from ..protocol.responses import ResponseEvent, ResponseObject


@dataclass(slots=True, kw_only=True, eq=False)
class Run:
    """A response that is made without a client waiting: its events so far, and how to stop it."""

    stop: Callable[[], None]
    events: list[ResponseEvent] = field(default_factory=list)
    is_done: bool = False
    task: "asyncio.Task[None] | None" = None
    _grown: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, events: list[ResponseEvent], *, is_done: bool = False) -> None:
        """More events; whoever reads them wakes up."""
        self.events += events
        self.is_done = self.is_done or is_done
        self._grown.set()
        self._grown = asyncio.Event()

    async def read(self, starting_after: int = -1) -> AsyncIterator[ResponseEvent]:
        """The events behind a sequence number, until the last."""
        at = starting_after + 1
        while True:
            grown = self._grown
            while at < len(self.events):
                yield self.events[at]
                at += 1
            if self.is_done:
                return
            await grown.wait()


@dataclass(slots=True, kw_only=True, eq=False)
class StoredResponse:
    """A response with what led to it. history: all items before its own output."""

    user: str
    response: ResponseObject
    history: list[dict[str, Any]]
    run: Run | None = None
    num_bytes: int = 0
    is_deleted: bool = False

    def items(self) -> list[dict[str, Any]]:
        """History and output: what a next response goes on from."""
        output: list[dict[str, Any]] = msgspec.to_builtins(self.response.output)
        return [*self.history, *output]


class ResponseStore:
    """Owns the responses, the one that was used last at the end.

    Invariant: no more than `max_responses`, and but for a single one no more than `max_bytes`. Items that responses
    of one conversation share are counted for each, so that the memory is less than the count.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, stored: StoredResponse) -> None:
        """Keep a response, or count it again when it has grown; the ones that were not used for longest go. One that
        was deleted while it was being made does not come back."""
        if stored.is_deleted:
            return
        self._forget(stored.response.id)
        stored.num_bytes = len(msgspec.json.encode((stored.response, stored.history)))
        if stored.run is not None:
            stored.num_bytes += len(msgspec.json.encode(stored.run.events))
        self._kept[stored.response.id] = stored
        self.num_bytes += stored.num_bytes
        while len(self._kept) > self._max_responses or (self.num_bytes > self._max_bytes and len(self._kept) > 1):
            self._forget(next(self._idle()))

    def get(self, user: str, response_id: str, param: str = "response_id") -> StoredResponse:
        """A response of this user. Raises ApiError 404."""
        stored = self._kept.get(response_id)
        if stored is None or stored.user != user:
            raise ApiError(
                404,
                f"no response {response_id!r:.100}: it was never stored, was deleted, or is too old (the last "
                f"{self._max_responses} responses are kept, {self._max_bytes / 2**20:.0f} MiB in all)",
                code="response_not_found",
                param=param,
            )
        self._kept.move_to_end(response_id)
        return stored

    def delete(self, user: str, response_id: str) -> None:
        """Forget a response, and stop it if it is not done. Raises ApiError 404."""
        stored = self.get(user, response_id)
        self._forget(response_id)
        stored.is_deleted = True
        if stored.run is not None and not stored.run.is_done:
            stored.run.stop()

    def find_item(self, user: str, item_id: str) -> dict[str, Any]:
        """An item of a response that is kept. Raises ApiError 404."""
        for stored in reversed(self._kept.values()):
            if stored.user == user:
                for item in stored.items():
                    if item.get("id") == item_id:
                        return item
        raise ApiError(
            404, f"no item {item_id!r:.100} in the responses that are kept", code="item_not_found", param="input"
        )

    def check_integrity(self) -> None:
        """Raise AssertionError if the invariant does not hold."""
        assert self.num_bytes == sum(stored.num_bytes for stored in self._kept.values())
        assert len(self._kept) <= self._max_responses
        assert self.num_bytes <= self._max_bytes or len(self._kept) == 1

    def _forget(self, response_id: str) -> None:
        stored = self._kept.pop(response_id, None)
        if stored is not None:
            self.num_bytes -= stored.num_bytes

    def _idle(self) -> Iterator[str]:
        """Those that may go first; one that still runs goes only if there is nothing else."""
        yield from (name for name, stored in self._kept.items() if stored.run is None or stored.run.is_done)
        yield from self._kept
