"""OpenAI's batch files: a request a line, answered through the server's own routes in this process."""

import asyncio
import contextlib
import errno
import fcntl
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import uvloop
from starlette.types import ASGIApp

from ..config import EngineConfig, ServerConfig
from ..errors import CapacityError, ConfigError, HeadraceError, RequestError
from ..json_text import parse_json
from ..scheduler.request import resolve_seed
from .app import make_app
from .protocol.common import new_id
from .server import Server
from .signals import heeded

logger = logging.getLogger(__name__)

_SAMPLED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
URLS = (*_SAMPLED, "/v1/embeddings")
_BEGINNING = b'{"id": "batch_req'
"""Of a line of ours: what a crash cut off begins so."""
_UNLIMITED = 10**9
_MAX_ERRORS = 3
_LIVE = ("stream", "stream_options", "background")
"""Fields of a request about how somebody waits for its answer; here nobody does."""


@dataclass(slots=True, kw_only=True)
class BatchSummary:
    """What became of a batch. num_skipped: answered by an earlier run. is_complete: False after a signal, whose
    number is `signal`."""

    num_requests: int
    num_skipped: int = 0
    num_completed: int = 0
    num_failed: int = 0
    is_complete: bool = True
    signal: int = 0


def run_batch(config: EngineConfig, source: Path, target: Path) -> BatchSummary:
    """Answer the requests of `source` that `target` has no answer to, appending a line for each to `target`.

    Ctrl-C ends it after the lines that are finished; another run goes on from there. Raises RequestError for a file
    that is no batch, CapacityError for a full disk, and what loading a model raises.
    """
    _check_files(source, target)
    ids = [line["custom_id"] for line in read_batch(source)]
    try:
        out = target.open("a", encoding="utf-8")
    except OSError as error:
        raise _cannot_write(target, error) from None
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(_close, out)
        _lock(out, target)
        answered = read_answers(target)
        summary = BatchSummary(num_requests=len(ids), num_skipped=len(answered.intersection(ids)))
        if summary.num_skipped < len(ids):
            # No client waits: nothing is refused for want of room or time.
            limits = ServerConfig(
                max_queue_requests=_UNLIMITED,
                max_queue_tokens=_UNLIMITED,
                max_body_bytes=_UNLIMITED,
                request_timeout_s=10**7,
            )
            uvloop.run(_Batch(replace(config, server=limits), summary, out).run(source, answered))
    return summary


def read_batch(source: Path) -> Iterator[dict[str, Any]]:
    """The lines of a batch file. Raises RequestError that names the first lines that are wrong."""
    seen: dict[str, int] = {}
    problems: list[str] = []
    try:
        with source.open(encoding="utf-8-sig") as file:
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
    except OSError as error:
        raise RequestError(f"{source} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
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
    try:
        with target.open("r+b") as file:
            end, ends_line = 0, True
            for number, line in enumerate(file, 1):
                custom_id = _answered(line)
                if custom_id is None:
                    if line.startswith(_BEGINNING) or _BEGINNING.startswith(line):
                        break  # cut off
                    raise RequestError(
                        f"{target} exists and line {number} is no answer of a batch",
                        remedies=["another file for the output"],
                    )
                found.add(custom_id)
                end += len(line)
                ends_line = line.endswith(b"\n")
            file.truncate(end)
            if not ends_line:
                file.seek(end)
                file.write(b"\n")
    except OSError as error:
        raise _cannot_write(target, error) from None
    return found


def _check_files(source: Path, target: Path) -> None:
    """Raise RequestError for what is no file: the input is read twice, the output before it is written to."""
    for path, name in ((source, "input"), (target, "output")):
        if str(path) == "-" or (path.exists() and not path.is_file()):
            raise RequestError(f"the {name} of a batch must be a file, and {path} is none")
    if source.exists() and target.exists() and source.samefile(target):
        raise RequestError(
            f"{source} is the input and the output of the batch", remedies=["another file for the output"]
        )


def _lock(out: TextIO, target: Path) -> None:
    """Keep other runs away from an output until it is closed, which the system does for a process that dies.

    Raises RequestError if another run has it. Where the file system knows no locks, none is held.
    """
    try:
        fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RequestError(
            f"another run of `headrace run-batch` is writing {target}",
            remedies=["the same command when that has ended", "another file for the output"],
        ) from None
    except OSError as error:
        logger.warning("%s cannot be locked (%s): let no other run write it meanwhile", target, error.strerror)


def _answered(line: bytes) -> str | None:
    """The custom_id of an answer, None if the line is none."""
    try:
        found = parse_json(line)
    except ValueError:
        return None
    is_answer = isinstance(found, dict) and ("response" in found or "error" in found)
    custom_id = found.get("custom_id") if is_answer else None
    return custom_id if isinstance(custom_id, str) else None


def _cannot_write(target: Path, error: OSError) -> CapacityError | ConfigError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CapacityError(
            f"no space left to write {target}", remedies=["free some space; the same command goes on from there"]
        )
    return ConfigError(f"cannot write {target}: {error.strerror}")


def _close(out: TextIO) -> None:
    """What could not be written was told when it was; closing would try it again."""
    with contextlib.suppress(OSError):
        out.close()


def _parse(text: str) -> tuple[dict[str, Any], str]:
    """A line, and what is wrong with it."""
    try:
        line = parse_json(text)
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
        self._failure: HeadraceError | None = None
        self._room = asyncio.Semaphore(2 * config.scheduler.max_num_seqs)

    async def run(self, source: Path, answered: set[str]) -> None:
        """Answer what is left, as many at once as the engine takes."""
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        loop = asyncio.get_running_loop()
        numbers = heeded()
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number, task)
        try:
            await self._server.load()
            async with asyncio.TaskGroup() as group:
                for line in read_batch(source):
                    if line["custom_id"] not in answered:
                        await self._room.acquire()
                        group.create_task(self._answer(line))
        except asyncio.CancelledError:
            if self._failure is not None:
                raise self._failure from None
            self._summary.is_complete = False
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
            await self._server.close()

    def _on_signal(self, number: int, task: asyncio.Task[None]) -> None:
        self._summary.signal = self._summary.signal or number
        task.cancel()

    async def _answer(self, line: dict[str, Any]) -> None:
        try:
            body = {name: value for name, value in line["body"].items() if name not in _LIVE}
            if (
                body.get("seed") is None and line["url"] in _SAMPLED
            ):  # not by its turn, which may be another next time
                body["seed"] = resolve_seed(None, self._config.scheduler.seed, line["custom_id"])
            status, request_id, answer = await call(self._app, line["url"], body)
        finally:
            self._room.release()
        record = {
            "id": new_id("batch_req_"),
            "custom_id": line["custom_id"],
            "response": {"status_code": status, "request_id": request_id, "body": answer},
            "error": None,
        }
        try:
            self._out.write(json.dumps(record) + "\n")
            self._out.flush()
        except OSError as error:
            if self._failure is None:
                self._failure = _cannot_write(Path(self._out.name), error)
                self._task.cancel()
            return
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
    return got["status"], request_id, parse_json(got["body"])
