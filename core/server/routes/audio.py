"""/v1/audio/transcriptions and /v1/audio/translations: speech to text by Whisper, whole or window by window."""

import asyncio
import dataclasses
import math
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ...audio.decode import read_audio
from ...audio.languages import LANGUAGES
from ...audio.subtitles import subtitles
from ...audio.whisper import Answer, Question, Task, Transcriber, Transcription, TranscriptionParams
from ..api_errors import ApiError, ClientGone
from ..frames import Output
from ..generation import Generation
from ..http import EventStream, JsonResponse, invalid_fields, note_unknown, read_body, watched
from ..protocol.audio import (
    DurationUsage,
    TranscriptionEvent,
    TranscriptionRequest,
    TranscriptionResponse,
    TranscriptionSegment,
)
from ..protocol.common import new_id
from .text import CHUNKS, as_api_error, collected

if TYPE_CHECKING:
    from ..server import Server


async def transcriptions(request: Request) -> Response:
    """The text of a recording in its own language."""
    return await _answer(request, "transcribe")


async def translations(request: Request) -> Response:
    """The text of a recording in English."""
    return await _answer(request, "translate")


async def _answer(request: Request, task: Task) -> Response:
    server: Server = request.app.state.server
    try:
        body, data = await _read_form(request, server.config.server.max_body_bytes)
    except ApiError:
        server.check_model(None)
        server.whisper()  # a model that does not listen is the better reason
        raise
    server.check_model(body.model)
    model = server.whisper()
    if body.stream and body.response_format not in ("json", "text"):
        reason = f"response_format: {body.response_format} is not streamed; json and text are"
        raise ApiError(400, reason, code="unsupported_parameter", param="response_format")
    wants_times = body.response_format in ("srt", "vtt", "verbose_json")
    params = TranscriptionParams(
        language=body.language,
        task=task,
        prompt=body.prompt,
        timestamps=True if wants_times else None,
        temperature=body.temperature,
        compression_ratio_threshold=body.compression_ratio_threshold,
        logprob_threshold=body.logprob_threshold,
        no_speech_threshold=body.no_speech_threshold,
        seed=body.seed,
    )
    job = await server.prompts.run(lambda: Transcriber(model, read_audio(data), params))
    work = _Work(server, request, job)
    work.begin()
    if body.stream:
        return EventStream(
            _events(work),
            on_gone=work.cancel,
            ping_interval_s=server.config.server.ping_interval_s,
            send_timeout_s=server.config.server.send_timeout_s,
            headers={"x-request-id": work.id},
        )
    async with watched(request, work.cancel):
        async for _ in work.pieces():
            pass
    return _response(job.result(), body.response_format, task, {"x-request-id": work.id})


class _Work:
    """One recording in the engine, question by question."""

    def __init__(self, server: "Server", request: Request, job: Transcriber) -> None:
        self.id = new_id("transcr-")
        self.job = job
        self._server = server
        self._request = request
        self._asking = job.ask()
        self._num_asked = 0
        self._questions: list[Question] = []
        self._generation: Generation | None = None
        self._is_gone = False

    def begin(self) -> None:
        """Ask what is to be known of the first window. Raises ApiError if the queue is full."""
        self._ask(next(self._asking, []))

    async def pieces(self) -> AsyncIterator[str]:
        """The text as windows are heard. Raises ApiError or ClientGone."""
        given = 0
        while self._questions:
            assert self._generation is not None
            try:
                outputs = await collected(self._generation)
            except ApiError as error:
                self._server.engine.cancel(self._generation, error)  # the other questions, if one of them failed
                raise
            found = [_as_answer(question, out) for question, out in zip(self._questions, outputs, strict=True)]
            try:
                questions = self._asking.send(found)
            except StopIteration:
                questions = []
            text = "".join(segment.text for segment in self.job.segments)
            if text[given:]:
                yield text[given:] if given else text.lstrip()
                given = len(text)
            self._ask(questions)

    def cancel(self) -> None:
        """The client has left."""
        self._is_gone = True
        if self._generation is not None:
            self._server.engine.cancel(self._generation, ClientGone())

    def _ask(self, questions: list[Question]) -> None:
        self._questions = questions
        if self._is_gone:
            raise ClientGone
        if questions:
            self._num_asked += 1
            request_id = f"{self.id}-{self._num_asked}"
            self._generation = self._server.submit_questions(self._request, request_id, questions)


async def _events(work: _Work) -> AsyncIterator[bytes]:
    try:
        async for piece in work.pieces():
            yield CHUNKS.encode(TranscriptionEvent(type="transcript.text.delta", delta=piece))
        result = work.job.result()
        yield CHUNKS.encode(TranscriptionEvent(type="transcript.text.done", text=result.text, usage=_usage(result)))
        yield CHUNKS.end
    except (ClientGone, asyncio.CancelledError):
        work.cancel()
    except Exception as error:  # noqa: BLE001 - told to the client, and logged if it is unknown
        yield CHUNKS.failure(as_api_error(error, work.id))


class _FormParser(MultiPartParser):
    """One that keeps files in memory, where they are already: no disk has to have room for a recording."""

    spool_max_size = 2**62


async def _read_form(request: Request, max_bytes: int) -> tuple[TranscriptionRequest, bytes]:
    """The fields and the recording. Raises ApiError."""
    body = await read_body(request, max_bytes)

    async def parts() -> AsyncGenerator[bytes, None]:
        yield body

    try:
        form = await _FormParser(request.headers, parts(), max_files=1, max_fields=32).parse()
    except MultiPartException as error:
        raise ApiError(400, f"send a multipart form with a file: {error.message}", code="invalid_form") from None
    except Exception as error:
        raise ApiError(400, "send a multipart form with a file", code="invalid_form") from error
    upload = form.get("file")
    if not isinstance(upload, UploadFile):
        raise ApiError(400, "the form has no file: the recording is missing", code="invalid_form", param="file")
    data = await upload.read()
    fields: dict[str, Any] = {}
    for name, value in form.multi_items():
        if name.endswith("[]"):
            fields.setdefault(name[:-2], []).append(value)
        elif name != "file" and value != "":
            fields[name] = value
    await form.close()
    try:
        made = msgspec.convert(fields, TranscriptionRequest, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_fields(error) from None
    note_unknown(request, msgspec.json.encode(fields), made)
    return made, data


def _as_answer(question: Question, output: Output) -> Answer:
    prompt = output.prompt_logprobs[-1] if output.prompt_logprobs else None
    return Answer(
        token_ids=output.token_ids,
        logprobs=[entries[0].logprob for entries in output.logprobs or ()],
        prompt_logprob=prompt[0].logprob if prompt else 0.0,
    )


def _usage(result: Transcription) -> DurationUsage:
    return DurationUsage(seconds=math.ceil(result.duration_s))


def _response(result: Transcription, form: str, task: Task, headers: dict[str, str]) -> Response:
    if form == "text":
        return PlainTextResponse(result.text + "\n", headers=headers)
    if form in ("srt", "vtt"):
        return PlainTextResponse(subtitles(result, form), headers=headers)
    if form == "json":
        return JsonResponse(TranscriptionResponse(text=result.text, usage=_usage(result)), headers=headers)
    segments = [msgspec.convert(dataclasses.asdict(one), TranscriptionSegment) for one in result.segments]
    whole = TranscriptionResponse(
        text=result.text,
        task=task,
        language=LANGUAGES.get(result.language, result.language),
        duration=result.duration_s,
        segments=segments,
        usage=_usage(result),
    )
    return JsonResponse(whole, headers=headers)
