"""The page and the events that feed it, over plain HTTP; tests/clients drives the page in a browser."""

import asyncio
import base64
import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.core.server.api_errors import ApiError
from headrace.core.server.frames import StepTrace, TraceRow
from headrace.core.server.step_feed import StepFeed
from live_server import LiveServer


def test_the_page_loads_nothing_from_elsewhere(server: LiveServer) -> None:
    page = httpx.get(f"{server.url}/")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    # The only address is the name of a namespace; style attributes and handlers would need 'unsafe-inline'.
    assert set(re.findall(r"https?://[^'\"\s]+", page.text)) == {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"<[^>]+\s(?:style|on\w+|src)=", page.text)


@contextmanager
def listening(url: str, **options: Any) -> Iterator[Iterator[dict[str, Any]]]:
    """The events of the feed, from the first on, which has been read."""
    with httpx.stream("GET", f"{url}/debug/steps", timeout=30, **options) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in response.iter_lines() if line)
        first = next(lines)
        assert first.startswith("data: "), first
        yield (json.loads(line.removeprefix("data: ")) for line in lines)


def test_what_a_request_looks_like(server: LiveServer) -> None:
    server.wait_idle()
    with listening(server.url) as events:
        before = next(events)
        assert before["state"] == "" and before["figures"]["running"] == 0
        body = {"prompt": list(range(100, 140)), "max_tokens": 12, "ignore_eos": True}
        out = server.post("/v1/completions", body).json()
        steps: list[dict[str, Any]] = []
        kv: list[dict[str, Any]] = []
        last = before
        for event in itertools.islice(events, 20):
            last = event
            steps += event.get("steps", [])
            kv += event.get("kv", [])
            if event["figures"]["output_tokens"] == before["figures"]["output_tokens"] + 12 and len(steps) >= 12:
                break
    name = f"{out['id']}/0"
    assert [step["rows"] for step in steps] == [[[name, 40, True]], *([[[name, 1, False]]] * 11)]
    assert [step["step"] for step in steps] == list(range(steps[0]["step"], steps[0]["step"] + 12))
    assert all(step["ms"] > 0 for step in steps)
    figures = last["figures"]
    for name, count in (("first_tokens", 1), ("started_tokens", 40), ("hit_tokens", 0)):
        assert figures[name] - before["figures"][name] == count
    # 40 + 11 tokens have KV; three of the four blocks are full, and stay as a prefix.
    assert kv[-1]["held"] == {} and sum(kv[-1]["cached"][1::2]) >= 3
    assert kv[-1]["blocks"] == figures["blocks"] == figures["free_blocks"]


def test_blocks_of_requests_that_share_a_prefix(server: LiveServer) -> None:
    server.wait_idle()
    with listening(server.url) as events:
        prefix = list(range(100, 164))
        body = {"prompt": [[*prefix, 7], [*prefix, 8]], "max_tokens": 3900, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as response:
            assert response.status_code == 200
            held: dict[str, list[int]] = {}
            for event in itertools.islice(events, 20):
                (group,) = event.get("kv", [{"held": {}}])
                held = group["held"]
                if len(held) == 2:
                    break
    first, second = ({*_ids(runs)} for runs in held.values())
    assert len(first & second) == 4 and first - second and second - first
    assert 0 not in first | second


def test_the_feed_needs_the_key_and_the_page_none(model_folder: Path) -> None:
    with LiveServer(model_folder, "--kv-memory", "8MiB", "--api-key", "secret") as server:
        assert httpx.get(f"{server.url}/").status_code == 200
        refused = httpx.get(f"{server.url}/debug/steps")
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        with listening(server.url, headers={"authorization": "Bearer secret"}) as events:
            assert next(events)["state"] == ""
            assert server.terminate(10) == 0, "a page that listens must not delay the end"


def test_no_ui_removes_both(model_folder: Path) -> None:
    with LiveServer(model_folder, "--kv-memory", "8MiB", "--no-ui") as server:
        for path in ("/", "/debug/steps"):
            response = httpx.get(server.url + path)
            assert response.status_code == 404 and response.json()["error"]["code"] == "not_found"


def test_the_feed_goes_on_when_the_engine_is_killed(model_folder: Path) -> None:
    with LiveServer(model_folder, "--kv-memory", "8MiB") as server, listening(server.url) as events:
        server.engine.kill()
        # Another may be ready before the next event comes.
        told = (e["state"] == "restarting the engine" or e["figures"]["restarts"] == 1 for e in events)
        assert any(itertools.islice(told, 60))
        server.wait_for("starting another")
        assert any(not next(events)["state"] for _ in range(60))
        server.post("/v1/completions", {"prompt": "x", "max_tokens": 3, "ignore_eos": True})
        assert any(next(events).get("steps") for _ in range(20))


def test_the_engine_is_watched_while_somebody_listens() -> None:
    async def run() -> None:
        watched: list[bool] = []
        feed = StepFeed(watched.append, lambda: ("", {"running": 1.0}))
        first, second = feed.listen(), feed.listen()
        assert watched == [True]
        feed.remove(first)
        feed.remove(first)
        assert watched == [True]
        trace = StepTrace(step=3, seconds=0.001, rows=[TraceRow("a/0", 5, True)])
        for _ in range(300):
            feed.push(trace)
        events = second.events()
        event = await anext(events)
        assert (len(event.steps), event.missed, event.figures) == (256, 44, {"running": 1.0})
        assert event.steps[0].rows == [("a/0", 5, True)]
        feed.remove(second)
        assert watched == [True, False]
        assert [event async for event in events] == []
        for _ in range(32):
            feed.listen()
        with pytest.raises(ApiError, match="32 pages watch already"):
            feed.listen()
        feed.close()
        assert not feed.is_watched

    asyncio.run(run())


def _ids(runs: list[int]) -> Iterator[int]:
    for first, count in zip(runs[::2], runs[1::2], strict=True):
        yield from range(first, first + count)
