"""OpenAI's batch files: a request a line, answered through the server's own routes in this process."""

import asyncio
import errno
import json
import logging
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import uvloop
from starlette.types import ASGIApp

from ..config import EngineConfig, ServerConfig
from ..errors import CapacityError, RequestError
from .app import make_app
from .protocol.common import new_id
from .server import Server

logger = logging.getLogger(__name__)

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
_UNLIMITED = 10**9
_MAX_ERRORS = 3
_LIVE = ("stream", "stream_options", "background")
"""Fields of a request about how somebody waits for its answer; here nobody does."""


@dataclass(slots=True, kw_only=True)
class BatchSummary:
    """What became of a batch. num_skipped: answered by an earlier run. is_complete: False after Ctrl-C."""

    num_requests: int
    num_skipped: int = 0
    num_completed: int = 0
    num_failed: int = 0
    is_complete: bool = True


def run_batch(config: EngineConfig, source: Path, target: Path) -> BatchSummary:
    """Answer the requests of `source` that `target` has no answer to, appending a line for each to `target`.

    Ctrl-C ends it after the lines that are finished; another run goes on from there. Raises RequestError for a file
    that is no batch, CapacityError for a full disk, and what loading a model raises.
    """
    ids = [line["custom_id"] for line in read_batch(source)]
    answered = read_answers(target)
    summary = BatchSummary(num_requests=len(ids), num_skipped=len(answered.intersection(ids)))
    if summary.num_skipped == len(ids):
        return summary
    # No client waits: nothing is refused for want of room or time.
    limits = ServerConfig(
        max_queue_requests=_UNLIMITED, max_queue_tokens=_UNLIMITED, max_body_bytes=_UNLIMITED, request_timeout_s=10**7
    )
    try:
        with target.open("a", encoding="utf-8") as out:
            uvloop.run(_Batch(replace(config, server=limits), summary, out).run(source, answered))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise CapacityError(
            f"no space left to write {target}",
            remedies=["free some space; the same command goes on from there"],
        ) from None
    return summary


def read_batch(source: Path) -> Iterator[dict[str, Any]]:
    """The lines of a batch file. Raises RequestError that names the first lines that are wrong."""
    seen: dict[str, int] = {}
    problems: list[str] = []
    try:
        with source.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if not text.strip():
                    continue
                line, problem = _parse(text)
                custom_id = line.get("custom_id")
                if not problem and custom_id in seen:
                    problem = f"custom_id {custom_id!r} stands in line {seen[custom_id]} too"
                if problem:
                    problems.append(f"line {number}: {problem}")
                    if len(problems) == _MAX_ERRORS:
                        break
                    continue
                assert isinstance(custom_id, str)
                seen[custom_id] = number
                yield line
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{source} cannot be read: {error}") from None
    if problems:
        raise RequestError(f"{source} is no batch file: {'; '.join(problems)}", code="invalid_batch")
    if not seen:
        raise RequestError(f"{source} holds no request", code="invalid_batch")


def read_answers(target: Path) -> set[str]:
    """The custom_ids that a file of answers has. A last line that a crash cut off is removed from the file.

    Raises RequestError for a file that holds something else.
    """
    if not target.exists():
        return set()
    found: set[str] = set()
    with target.open("r+b") as file:
        end, ends_line = 0, True
        for number, line in enumerate(file, 1):
            try:
                found.add(json.loads(line)["custom_id"])
            except (ValueError, KeyError, TypeError):
                if not line.endswith(b"\n"):
                    break
                raise RequestError(
                    f"{target} exists and line {number} is no answer of a batch",
                    remedies=["another file for the output"],
                ) from None
            end += len(line)
            ends_line = line.endswith(b"\n")
        file.truncate(end)
        if not ends_line:
            file.seek(end)
            file.write(b"\n")
    return found


def _parse(text: str) -> tuple[dict[str, Any], str]:
    """A line, and what is wrong with it."""
    try:
        line = json.loads(text)
    except ValueError as error:
        return {}, f"not JSON ({error})"
    if not isinstance(line, dict):
        return {}, "not an object"
    if not isinstance(line.get("custom_id"), str) or not line["custom_id"]:
        return line, "no custom_id"
    if line.get("method", "POST") != "POST":
        return line, f"method {line['method']!r}, only POST is known"
    if line.get("url") not in URLS:
        return line, f"url {line.get('url')!r}, known are {', '.join(URLS)}"
    if not isinstance(line.get("body"), dict):
        return line, "no body"
    return line, ""


class _Batch:
    """One run over a file."""

    def __init__(self, config: EngineConfig, summary: BatchSummary, out: TextIO) -> None:
        self._config = config
        self._server = Server(config)
        self._app = make_app(self._server)
        self._summary = summary
        self._out = out
        self._room = asyncio.Semaphore(2 * config.scheduler.max_num_seqs)

    async def run(self, source: Path, answered: set[str]) -> None:
        """Answer what is left, as many at once as the engine takes."""
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
        try:
            await self._server.load()
            async with asyncio.TaskGroup() as group:
                for line in read_batch(source):
                    if line["custom_id"] not in answered:
                        await self._room.acquire()
                        group.create_task(self._answer(line))
        except asyncio.CancelledError:
            self._summary.is_complete = False
        finally:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
            await self._server.close()

    async def _answer(self, line: dict[str, Any]) -> None:
        try:
            body = {name: value for name, value in line["body"].items() if name not in _LIVE}
            status, request_id, answer = await call(self._app, line["url"], body)
        finally:
            self._room.release()
        record = {
            "id": new_id("batch_req_"),
            "custom_id": line["custom_id"],
            "response": {"status_code": status, "request_id": request_id, "body": answer},
            "error": None,
        }
        self._out.write(json.dumps(record) + "\n")
        self._out.flush()
        if status == 200:
            self._summary.num_completed += 1
        else:
            self._summary.num_failed += 1
        count = self._summary.num_completed + self._summary.num_failed
        if count % 100 == 0:
            left = self._summary.num_requests - self._summary.num_skipped - count
            logger.info("%d answered, %d to go", count, left)


async def call(app: ASGIApp, path: str, body: Any) -> tuple[int, str, Any]:
    """Send a JSON body to a route of an application in this process: status, request id, JSON answer."""
    sent = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    got: dict[str, Any] = {"body": b""}

    async def receive() -> dict[str, Any]:
        if sent:
            return sent.pop()
        await asyncio.Event().wait()  # this client does not leave
        raise AssertionError("unreachable")

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            got["status"] = message["status"]
            got["headers"] = dict(message["headers"])
        else:
            got["body"] += message.get("body", b"")

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
    }
    await app(scope, receive, send)
    request_id = got["headers"].get(b"x-request-id", b"").decode()
    return got["status"], request_id, json.loads(got["body"])
