"""/v1/audio through the openai client, against the Python API on the same weights."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from starlette.requests import Request

from headrace import LLM
from headrace.core.audio.whisper import TranscriptionParams
from headrace.core.server.prompts import Prompts
from headrace.core.server.routes.audio import _read_form
from headrace.core.server.unknown_fields import UnknownFields
from live_server import LiveServer
from tiny_speech import recording, tiny_whisper

SHORT, LONG = recording(3.2), recording(30.5, seed=1)
TIMES = TranscriptionParams(timestamps=True)


@pytest.fixture(scope="module")
def listening(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, LLM, LiveServer]]:
    """(client, the same model in this process, the server)."""
    folder = tiny_whisper(tmp_path_factory.mktemp("whisper") / "tiny")
    arguments = ["--kv-memory", "32MiB", "--load-format", "dummy", "--max-num-seqs", "4"]
    with LiveServer(folder, *arguments, device="reference") as server:
        with LLM(str(folder), device="reference", load_format="dummy", kv_memory="32MiB", max_num_seqs=4) as llm:
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
                yield client.audio, llm, server


def test_json_and_text_equal_the_python_api(listening: tuple[Any, LLM, LiveServer]) -> None:
    audio, llm, server = listening
    wanted = llm.transcribe(SHORT)[0]
    assert wanted.text and len(wanted.segments) == 1
    file = ("a.wav", SHORT)
    assert audio.transcriptions.create(model="tiny", file=file).text == wanted.text
    text = audio.transcriptions.create(model="tiny", file=file, response_format="text")
    assert text.rstrip("\n") == wanted.text
    german = llm.transcribe(SHORT, TranscriptionParams(language="de", task="translate", prompt="one fox"))[0]
    fields = {"model": "tiny", "prompt": "one fox", "language": "de"}  # the client calls its own method deprecated
    asked = httpx.post(
        f"{server.url}/v1/audio/translations", files={"file": ("a.wav", SHORT)}, data=fields, timeout=60
    )
    assert asked.json()["text"] == german.text


def test_the_log_proposes_a_request_that_works(listening: tuple[Any, LLM, LiveServer]) -> None:
    answer = listening[2].follow_example({"file": ("speech.wav", SHORT)})
    assert answer.status_code == 200 and "text" in answer.json(), answer.text


def test_segments_in_every_format(listening: tuple[Any, LLM, LiveServer]) -> None:
    audio, llm, _ = listening
    wanted = llm.transcribe(SHORT, TIMES)[0]
    file = ("a.wav", SHORT)
    found = audio.transcriptions.create(
        model="tiny", file=file, response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert found.text == wanted.text and float(found.duration) == pytest.approx(3.2)
    assert found.language in ("english", "german")
    assert [(one.start, one.end, one.text, one.tokens) for one in found.segments] == [
        (one.start, one.end, one.text, list(one.tokens)) for one in wanted.segments
    ]
    assert found.segments[0].no_speech_prob == pytest.approx(wanted.segments[0].no_speech_prob, rel=1e-3)
    srt = audio.transcriptions.create(model="tiny", file=file, response_format="srt")
    vtt = audio.transcriptions.create(model="tiny", file=file, response_format="vtt")
    assert srt.startswith("1\n00:00:") and srt.count(" --> ") == vtt.count(" --> ") == len(wanted.segments)
    assert vtt.startswith("WEBVTT\n\n00:00:") and "," in srt.split("\n")[1] and "," not in vtt.split("\n")[2]


@pytest.mark.slow
def test_a_stream_gives_the_text_window_by_window(listening: tuple[Any, LLM, LiveServer]) -> None:
    audio, llm, _ = listening
    wanted = llm.transcribe(LONG)[0]
    events = list(audio.transcriptions.create(model="tiny", file=("a.wav", LONG), stream=True))
    assert "".join(event.delta for event in events[:-1]).strip() == wanted.text
    assert events[-1].type == "transcript.text.done" and events[-1].text == wanted.text


def test_wrong_forms_are_refused(listening: tuple[Any, LLM, LiveServer]) -> None:
    audio, _, server = listening
    with pytest.raises(openai.BadRequestError, match="cannot be decoded"):
        audio.transcriptions.create(model="tiny", file=("a.txt", b"no sound at all"))
    with pytest.raises(openai.BadRequestError, match="no language 'xx'"):
        audio.transcriptions.create(model="tiny", file=("a.wav", SHORT), language="xx")
    with pytest.raises(openai.BadRequestError, match="response_format"):
        audio.transcriptions.create(model="tiny", file=("a.wav", SHORT), response_format="pdf")
    with pytest.raises(openai.NotFoundError, match="no model"):
        audio.transcriptions.create(model="other", file=("a.wav", SHORT))
    missing = httpx.post(f"{server.url}/v1/audio/transcriptions", files={"sound": b"x"})
    assert missing.status_code == 400 and "no file" in missing.text
    for field, value in (("temperature", "hot"), ("stream", "maybe"), ("response_format", "pdf")):
        wrong = httpx.post(
            f"{server.url}/v1/audio/transcriptions", files={"file": ("a.wav", SHORT)}, data={field: value}
        )
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == field
    twice = httpx.post(
        f"{server.url}/v1/audio/transcriptions", files=[("file", ("a.wav", SHORT)), ("file", ("b.wav", SHORT))]
    )
    assert twice.status_code == 400 and "Too many files" in twice.json()["error"]["message"]
    plain = httpx.post(f"{server.url}/v1/audio/transcriptions", json={"model": "tiny"})
    assert plain.status_code == 400 and "form" in plain.text
    listens_only = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a fox"})
    assert listens_only.status_code == 400 and "frames to read" in listens_only.text


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"temperature": "-1"}, "temperature must be 0 or more, got -1.0"),
        ({"seed": str(2**70)}, "seed must fit in 64 bits"),
        ({"response_format": "srt"}, "response_format: srt is not streamed; json and text are"),
        ({"response_format": "verbose_json"}, "response_format: verbose_json is not streamed"),
    ],
)
def test_a_stream_that_is_refused_is_none(
    listening: tuple[Any, LLM, LiveServer], data: dict[str, str], reason: str
) -> None:
    answer = httpx.post(
        f"{listening[2].url}/v1/audio/transcriptions", files={"file": ("a.wav", SHORT)}, data={"stream": "1", **data}
    )
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"]


def test_a_full_queue_is_told_before_a_stream_begins(tmp_path: Path) -> None:
    folder = tiny_whisper(tmp_path / "tiny")
    limits = {"HEADRACE_MAX_QUEUE_REQUESTS": "1"}
    with LiveServer(folder, "--kv-memory", "32MiB", env=limits) as server:

        def ask(_: int) -> httpx.Response:
            url = f"{server.url}/v1/audio/transcriptions"
            return httpx.post(
                url, files={"file": ("a.wav", SHORT)}, data={"stream": "1", "language": "en"}, timeout=60
            )

        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(ask, range(36)))
    assert {answer.status_code for answer in answers} == {200, 429}
    for answer in answers:
        if answer.status_code == 429:
            assert answer.json()["error"]["code"] == "queue_full" and int(answer.headers["retry-after"]) >= 1
        else:  # a later window, too, may find the queue full
            assert answer.text.endswith("data: [DONE]\n\n") or "queue_full" in answer.text


def test_a_recording_needs_no_room_on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = httpx.Request("POST", "http://x/", files={"file": ("a.wav", b"x" * 2**22)}, data={"language": "en"})
    body = whole.read()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    server = SimpleNamespace(unknown_fields=UnknownFields(), prompts=Prompts(None, "", ""))
    app = SimpleNamespace(state=SimpleNamespace(server=server))
    headers = [(b"content-type", whole.headers["content-type"].encode())]
    request = Request({"type": "http", "headers": headers, "path": "/", "app": app}, receive)
    monkeypatch.setattr("tempfile.tempdir", "/proc/nowhere")
    fields, data = asyncio.run(_read_form(request, 2**25))
    assert data == b"x" * 2**22 and fields.language == "en"


def test_a_model_of_text_does_not_listen(model_folder: Path) -> None:
    with LiveServer(model_folder) as server:
        answer = httpx.post(f"{server.url}/v1/audio/transcriptions", files={"file": ("a.wav", SHORT)})
        assert answer.status_code == 404 and "does not listen" in answer.text
        forms: list[dict[str, Any]] = [
            {"json": {"model": "tiny"}},
            {"content": b"x"},
            {"files": {"nothing": ("a.wav", SHORT)}},
        ]
        for form in forms:
            answer = httpx.post(f"{server.url}/v1/audio/translations", **form)
            assert answer.status_code == 404 and "does not listen" in answer.text
