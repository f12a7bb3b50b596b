"""Images in requests: OpenAI's parts and Anthropic's blocks give what the model gives in this process."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace import LLM, SamplingParams
from live_server import LiveServer
from vision_cases import data_url, make_chat_model, picture

LIMITS = {"HEADRACE_MAX_IMAGES": "2", "HEADRACE_MAX_IMAGE_PIXELS": "4000"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llava")
    make_chat_model(path)
    return path


@pytest.fixture(scope="module")
def seeing(folder: Path) -> Iterator[httpx.Client]:
    """A client of a server of a model that reads images."""
    options = ["--dtype", "float32", "--threads", "1", "--kv-memory", "16MiB"]
    with LiveServer(folder, *options, device="reference", env=LIMITS) as server:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            yield client


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[str]:
    """To the same question about two pictures, in this process."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(str(folder), device="reference", dtype="float32", kv_memory="16MiB") as llm:
        given: list[Any] = [[{"role": "user", "content": parts(data_url(picture(seed)))}] for seed in (1, 2)]
        return [output.outputs[0].text for output in llm.chat(given, params)]


def parts(url: str) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]


def chat(client: httpx.Client, content: Any, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    return client.post("/v1/chat/completions", json={**body, **fields})


def test_chat_sees_the_image(seeing: httpx.Client, answers: list[str]) -> None:
    for seed, want in zip((1, 2, 1), (*answers, answers[0]), strict=True):
        response = chat(seeing, parts(data_url(picture(seed))))
        assert response.json()["choices"][0]["message"]["content"] == want
        assert response.json()["usage"]["prompt_tokens"] > 16
    assert answers[0] != answers[1]


def test_messages_and_responses_see_it_too(seeing: httpx.Client, answers: list[str]) -> None:
    url = data_url(picture(1))
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    body = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "messages": [{"role": "user", "content": blocks}]}
    made = seeing.post("/v1/messages", json=body).json()
    assert made["content"][0]["text"] == answers[0]
    items = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "What is it?"}]
    asked = {"input": [{"role": "user", "content": items}], "max_output_tokens": 8, "temperature": 0}
    made = seeing.post("/v1/responses", json={**asked, "ignore_eos": True}).json()
    assert made["output"][0]["content"][0]["text"] == answers[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (parts("http://127.0.0.1:1/a.png"), "are not fetched by this server"),
        (parts("file:///etc/hostname"), "must be a data: URL"),
        (parts("/etc/hostname"), "must be a data: URL"),
        (parts("data:image/png;base64,AAAA"), "no image that Pillow can read"),
        (parts(data_url(picture(1, 100, 100))), "100 x 100 pixels; 4000 are allowed"),
        (parts(data_url(picture(1))) * 3, "3 images in one request; 2 are allowed"),
        ([{"type": "image_url"}], "holds no image"),
    ],
)
def test_images_that_cannot_be_used_are_400(seeing: httpx.Client, content: Any, message: str) -> None:
    response = chat(seeing, content)
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


def test_a_model_that_reads_text_alone_says_so(server: LiveServer) -> None:
    with httpx.Client(base_url=server.url) as client:
        response = chat(client, parts(f"data:;base64,{base64.b64encode(b'x').decode()}"))
    assert response.status_code == 400
    assert "reads no images" in response.json()["error"]["message"]
