"""/v1/responses through OpenAI's client, against chat and the Python API."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest

from headrace import LLM, SamplingParams
from live_server import LiveServer
from moody_platform import FAILING, install
from weather_tools import TOOLS, WEATHER

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 20}
FUNCTIONS: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]


def answer(llm: LLM, messages: list[Any]) -> str:
    """What the model says, greedily."""
    return llm.chat(messages, SamplingParams(temperature=0, max_tokens=20))[0].outputs[0].text


def test_a_response_and_what_goes_on_from_it(client: openai.OpenAI, llm: LLM) -> None:
    first = client.responses.create(input="Hello, world", instructions="Be brief.", metadata={"a": "b"}, **GREEDY)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello, world"}]
    assert first.output_text == answer(llm, messages)
    assert first.status in ("completed", "incomplete") and first.metadata == {"a": "b"}
    assert (first.status == "incomplete") == (first.incomplete_details is not None)
    assert (
        first.usage is not None and first.usage.total_tokens == first.usage.input_tokens + first.usage.output_tokens
    )
    assert (
        first.usage.input_tokens
        == client.responses.input_tokens.count(
            model="tiny", input="Hello, world", instructions="Be brief."
        ).input_tokens
    )

    second = client.responses.create(
        input=[{"role": "user", "content": "More"}], previous_response_id=first.id, **GREEDY
    )
    # The instructions were the first response's alone.
    said = [*messages[1:], {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "More"}]
    assert second.output_text == answer(llm, said)
    assert second.previous_response_id == first.id

    assert client.responses.retrieve(second.id) == second
    items = list(client.responses.input_items.list(second.id, limit=2, order="asc"))
    assert [(item.type, item.role) for item in items if item.type == "message"] == [
        ("message", "user"),
        ("message", "assistant"),
        ("message", "user"),
    ]
    newest = client.responses.input_items.list(second.id, limit=1)
    assert newest.data[0] == items[-1] and newest.has_more
    sideways: Any = "sideways"
    with pytest.raises(openai.BadRequestError, match="order must be asc or desc, got 'sideways'"):
        client.responses.input_items.list(second.id, order=sideways)

    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=first.id):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError, match=first.id):
        client.responses.create(input="x", previous_response_id=first.id, **GREEDY)
    # The second has all of the conversation itself.
    assert client.responses.create(input="x", previous_response_id=second.id, **GREEDY).output_text


def test_nothing_is_kept_without_store(client: openai.OpenAI) -> None:
    made = client.responses.create(input="Hello", store=False, **GREEDY)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_a_stream_is_the_whole(client: openai.OpenAI) -> None:
    whole = client.responses.create(input="Hello", top_logprobs=2, include=["message.output_text.logprobs"], **GREEDY)
    with client.responses.stream(
        input="Hello", top_logprobs=2, include=["message.output_text.logprobs"], **GREEDY
    ) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[1].type] == ["response.created", "response.in_progress"]
    last: Any = events[-1]
    assert last.type == f"response.{whole.status}"
    assert last.response.output_text == whole.output_text
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    message: Any = whole.output[0]
    streamed: Any = last.response.output[0]
    assert message.content[0].logprobs and streamed.content[0].logprobs == message.content[0].logprobs
    said = b"".join(bytes(entry.bytes) for entry in message.content[0].logprobs if entry.token[:2] != "<|")
    assert said.decode(errors="replace") == whole.output_text
    assert client.responses.retrieve(last.response.id).output_text == whole.output_text


def test_the_bytes_of_a_stream(server: LiveServer) -> None:
    text = server.post("/v1/responses", {"input": "Hello", "max_output_tokens": 3, "stream": True}).text
    for part in text.split("\n\n")[:-1]:
        name, data = part.split("\n")
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]
    assert "[DONE]" not in text


def test_calls_whole_and_streamed(random_client: openai.OpenAI) -> None:
    options: dict[str, Any] = dict(
        model="tiny",
        input="What is the weather in Paris?",
        tools=FUNCTIONS,
        tool_choice={"type": "function", "name": "weather"},
        max_output_tokens=900,
        extra_body={"seed": 3},
    )
    whole = random_client.responses.create(**options)
    call: Any = whole.output[0]
    assert (call.type, call.name, call.status, whole.status) == ("function_call", "weather", "completed", "completed")
    arguments = json.loads(call.arguments)
    assert arguments["city"] in ("Paris", "Rome") and 1 <= arguments["days"] <= 9
    with random_client.responses.stream(**options) as stream:
        final: Any = stream.get_final_response()
    assert json.loads(final.output[0].arguments) == arguments

    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    after = random_client.responses.create(
        model="tiny", input=[result], previous_response_id=whole.id, tools=FUNCTIONS, tool_choice="none",
        max_output_tokens=5, text={"format": {"type": "text"}},
    )  # fmt: skip
    assert after.output[0].type == "message"
    only_now = random_client.responses.create(
        **{**options, "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"name": "now"}]}},
        parallel_tool_calls=False,
    )
    assert {item.name for item in only_now.output if item.type == "function_call"} == {"now"}


def test_a_form_of_the_text(random_client: openai.OpenAI) -> None:
    class Weather(pydantic.BaseModel):
        city: Literal["Paris", "Rome"]
        days: Literal[1, 2, 3]

    options: dict[str, Any] = dict(model="tiny", input="Weather?", max_output_tokens=900, extra_body={"seed": 6})
    format: Any = {"type": "json_schema", "name": "weather", "schema": WEATHER, "strict": True}
    found = json.loads(random_client.responses.create(text={"format": format}, **options).output_text)
    assert found["city"] in ("Paris", "Rome") and 1 <= found["days"] <= 9
    assert isinstance(random_client.responses.parse(text_format=Weather, **options).output_parsed, Weather)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({}, "invalid_input"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "unsupported_parameter"),
        ({"input": "x", "conversation": "c"}, "unsupported_parameter"),
        ({"input": "x", "prompt": {"id": "p"}}, "unsupported_parameter"),
        ({"input": "x", "include": ["file_search_call.results"]}, "unsupported_parameter"),
        ({"input": "x", "n": 2}, "unsupported_parameter"),
        ({"input": "x", "background": True, "store": False}, "invalid_request"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "x"}}}, "invalid_response_format"),
        ({"input": "x", "text": {"format": {}}}, "invalid_response_format"),
        ({"input": "x", "tool_choice": "required"}, "invalid_tools"),
        ({"input": "x " * 5000}, "context_length_exceeded"),
        ({"input": [{"type": "computer_call"}]}, "invalid_input"),
        ({"input": [{"id": "msg_1"}]}, "item_not_found"),
        ({"input": "x", "metadata": {"a": 1}}, "invalid_request"),
        ({"input": "x", "max_output_tokens": -1}, "invalid_sampling_params"),
        ({"input": "x", "previous_response_id": "resp_none"}, "response_not_found"),
    ],
)
def test_errors(server: LiveServer, body: dict[str, Any], code: str) -> None:
    for stream in (False, True):
        response = server.post("/v1/responses", {**body, "stream": stream})
        assert response.status_code == (404 if code.endswith("_not_found") else 400), response.text
        error = response.json()["error"]
        assert error["code"] == code
        for name in {"max_output_tokens", "previous_response_id"} & set(body):
            assert error["param"] == name  # in the words of this route, not of the engine


def test_truncation_drops_the_oldest_turns(server: LiveServer, llm: LLM) -> None:
    turns = [{"role": role, "content": f"{n} " * 900} for n in range(6) for role in ("user", "assistant")]
    body = {"input": [*turns, {"role": "user", "content": "Now?"}], "instructions": "Be brief.", **GREEDY}
    assert server.post("/v1/responses", body).json()["error"]["code"] == "context_length_exceeded"
    made = server.post("/v1/responses", {**body, "truncation": "auto"}).json()
    kept = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Now?"}]
    sizes = []
    for start in range(0, 13, 2):
        messages = [kept[0], *turns[start:], kept[1]]
        sizes.append(len(llm.tokenizer.encode(llm.render_chat(messages), add_special_tokens=False)))
    assert made["usage"]["input_tokens"] == max(size for size in sizes if size + 20 <= 4096)


# ---- in the background ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def slow_server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose steps take 5 ms and which keeps few responses."""
    env = install(tmp_path_factory.mktemp("plugins") / "site", step_s=0.005)
    env |= {"HEADRACE_LOAD_FORMAT": "dummy", "HEADRACE_KV_MEMORY": "32MiB", "HEADRACE_MAX_STORED_RESPONSES": "3"}
    with LiveServer(model_folder, env=env, device="moody") as running:
        yield running


@pytest.fixture(scope="module")
def slow_client(slow_server: LiveServer) -> Iterator[openai.OpenAI]:
    """OpenAI's own client of it."""
    with openai.OpenAI(base_url=f"{slow_server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_background_responses_are_polled(slow_client: openai.OpenAI, llm: LLM) -> None:
    made = slow_client.responses.create(input="Hello", background=True, **GREEDY)
    assert made.status == "in_progress" and made.background and made.output_text == ""
    while made.status == "in_progress":
        time.sleep(0.02)
        made = slow_client.responses.retrieve(made.id)
    assert made.output_text == answer(llm, [{"role": "user", "content": "Hello"}])
    assert slow_client.responses.cancel(made.id).status == made.status


def test_background_responses_can_be_cancelled(slow_server: LiveServer, slow_client: openai.OpenAI) -> None:
    options: dict[str, Any] = dict(model="tiny", input="Hello", background=True, extra_body={"ignore_eos": True})
    made = slow_client.responses.create(**options)
    with pytest.raises(openai.BadRequestError, match="not done yet"):
        slow_client.responses.create(input="x", previous_response_id=made.id, model="tiny")
    assert slow_client.responses.cancel(made.id).status == "cancelled"
    slow_server.wait_idle()
    assert slow_client.responses.retrieve(made.id).status == "cancelled"
    slow_client.responses.delete(slow_client.responses.create(**options).id)
    slow_server.wait_idle()


def test_background_streams_can_be_taken_up_again(slow_server: LiveServer, slow_client: openai.OpenAI) -> None:
    body = {"input": "Hello", "background": True, "stream": True, "max_output_tokens": 150, "ignore_eos": True}
    with httpx.stream("POST", f"{slow_server.url}/v1/responses", json=body, timeout=30) as response:
        lines = response.iter_lines()
        data = [json.loads(line[6:]) for line in (next(lines) for _ in range(20)) if line.startswith("data: ")]
    response_id, last = data[0]["response"]["id"], data[-1]["sequence_number"]
    rest: list[Any] = list(slow_client.responses.retrieve(response_id, stream=True, starting_after=last))
    assert [event.sequence_number for event in rest] == list(range(last + 1, last + 1 + len(rest)))
    assert rest[-1].type == "response.incomplete"
    text = "".join(e["delta"] for e in data if e["type"].endswith("text.delta"))
    text += "".join(event.delta for event in rest if event.type == "response.output_text.delta")
    assert text == rest[-1].response.output_text


def test_a_failure_in_the_midst(slow_server: LiveServer) -> None:
    text = slow_server.post("/detokenize", {"tokens": FAILING[:3]}).json()["prompt"]
    made = slow_server.post("/v1/responses", {"input": text, "stream": True, **GREEDY})
    if made.status_code == 200:  # the engine failed after the first event
        event = json.loads(made.text.strip().split("\n")[-1].removeprefix("data: "))
        assert event["type"] == "response.failed" and event["response"]["error"]["message"]
    else:
        assert made.status_code == 500


def test_old_responses_are_forgotten(slow_client: openai.OpenAI) -> None:
    made = [slow_client.responses.create(input="Hello", **GREEDY).id for _ in range(4)]
    with pytest.raises(openai.NotFoundError, match=f"{made[0]}.*the last 3 responses"):
        slow_client.responses.retrieve(made[0])
    assert slow_client.responses.retrieve(made[1]).id == made[1]
