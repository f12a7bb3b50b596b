"""The store keeps its limits whatever is put into it, and knows whose responses they are."""

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.server.api_errors import ApiError
from headrace.core.server.protocol.responses import ReasoningOptions, ResponseEvent, ResponseObject, TextOptions
from headrace.core.server.responses.store import ResponseStore, Run, StoredResponse


def make_stored(name: str, *, user: str = "u", size: int = 0) -> StoredResponse:
    """A response whose history has `size` letters."""
    values = {"reasoning": ReasoningOptions(), "text": TextOptions(), "metadata": {}, "output": [], "tools": []}
    fields = {f.name: None for f in msgspec.structs.fields(ResponseObject) if f.required} | values
    response = ResponseObject(**{**fields, "id": name, "status": "completed"})  # type: ignore[arg-type]
    return StoredResponse(user=user, response=response, history=[{"id": f"{name}-item", "text": "x" * size}])


@given(sizes=st.lists(st.integers(0, 3000), max_size=30), limit=st.integers(1, 8))
def test_limits_hold(sizes: list[int], limit: int) -> None:
    store = ResponseStore(limit, 6000)
    for number, size in enumerate(sizes):
        store.put(make_stored(f"r{number % 12}", size=size))
        store.check_integrity()
        assert store.get("u", f"r{number % 12}").history[0]["text"] == "x" * size


def test_the_one_not_used_for_longest_goes_and_is_named() -> None:
    store = ResponseStore(2, 10**6)
    for name in ("a", "b"):
        store.put(make_stored(name))
    store.get("u", "a")
    store.put(make_stored("c"))
    assert store.get("u", "a") and store.get("u", "c")
    with pytest.raises(ApiError, match="'b'.*the last 2 responses") as gone:
        store.get("u", "b")
    assert (gone.value.status, gone.value.code) == (404, "response_not_found")


def test_others_cannot_see_it() -> None:
    store = ResponseStore(2, 10**6)
    store.put(make_stored("a"))
    assert store.find_item("u", "a-item")["id"] == "a-item"
    for attempt in (store.get, store.delete):
        with pytest.raises(ApiError):
            attempt("v", "a")
    with pytest.raises(ApiError):
        store.find_item("v", "a-item")
    store.delete("u", "a")
    assert len(store) == store.num_bytes == 0


def test_deleting_stops_a_run() -> None:
    stopped: list[bool] = []

    async def work() -> list[int]:
        store = ResponseStore(2, 10**6)
        stored = make_stored("a")
        run = stored.run = Run(stop=lambda: stopped.append(True))
        store.put(stored)
        reader = asyncio.ensure_future(read(run, 0))
        for number in range(3):
            run.add([ResponseEvent(type="x", sequence_number=number)])
            await asyncio.sleep(0)
        store.delete("u", "a")
        run.add([], is_done=True)
        return await reader

    async def read(run: Run, starting_after: int) -> list[int]:
        return [event.sequence_number async for event in run.read(starting_after)]

    assert asyncio.run(work()) == [1, 2] and stopped == [True]


def test_one_that_is_deleted_while_it_is_made_does_not_come_back() -> None:
    store = ResponseStore(2, 10**6)
    stored = make_stored("a")
    store.put(stored)
    store.delete("u", "a")
    store.put(stored)
    assert len(store) == store.num_bytes == 0
