"""/v1/messages through Anthropic's client, against the Python API."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from headrace import LLM, SamplingParams
from live_server import LiveServer
from weather_tools import TOOLS, WEATHER

ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 20, "messages": [{"role": "user", "content": "Hello, world"}]}
GREEDY: dict[str, Any] = {**ASK, "extra_body": {"temperature": 0}}
CLIENT_TOOLS: list[Any] = [
    {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS
]


@pytest.fixture(scope="module")
def claude(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    """Anthropic's own client."""
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def random_claude(random_server: LiveServer) -> Iterator[anthropic.Anthropic]:
    """The same, of a server whose masks are real."""
    with anthropic.Anthropic(base_url=random_server.url, api_key="none", max_retries=0) as made:
        yield made


def test_a_message(claude: anthropic.Anthropic, llm: LLM) -> None:
    message = claude.messages.create(system="Be brief.", **GREEDY)
    wanted = llm.chat(
        [{"role": "system", "content": "Be brief."}, *ASK["messages"]], SamplingParams(temperature=0, max_tokens=20)
    )[0]
    (block,) = message.content
    assert block.type == "text" and block.text == wanted.outputs[0].text
    assert message.stop_reason == ("max_tokens" if wanted.outputs[0].finish_reason == "length" else "end_turn")
    cached = message.usage.cache_read_input_tokens or 0
    assert message.usage.input_tokens + cached == len(wanted.prompt_token_ids)
    assert message.usage.output_tokens == len(wanted.outputs[0].token_ids)
    counted = claude.messages.count_tokens(model="tiny", messages=ASK["messages"], system="Be brief.")
    assert counted.input_tokens == len(wanted.prompt_token_ids)


def test_a_stream_is_the_whole(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(**GREEDY)
    with claude.messages.stream(**GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    wanted: Any = whole.content[0]
    assert [getattr(block, "text", None) for block in final.content] == [text] == [wanted.text]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_the_bytes_of_a_stream(server: LiveServer) -> None:
    text = server.post("/v1/messages", {**ASK, "stream": True}).text
    names = []
    for part in text.split("\n\n")[:-1]:
        name, data = part.split("\n")
        names.append(name.removeprefix("event: "))
        assert json.loads(data.removeprefix("data: "))["type"] == names[-1]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_the_last_message_is_gone_on_with(claude: anthropic.Anthropic, llm: LLM) -> None:
    messages: list[Any] = [*ASK["messages"], {"role": "assistant", "content": "The quick"}]
    message = claude.messages.create(**{**GREEDY, "messages": messages})
    params = SamplingParams(temperature=0, max_tokens=20)
    assert getattr(message.content[0], "text", None) == (
        llm.chat(messages, params, continue_final_message=True)[0].outputs[0].text
    )


def test_stop_sequences(claude: anthropic.Anthropic) -> None:
    whole: Any = claude.messages.create(**GREEDY).content[0]
    stop = whole.text[3:6]
    message = claude.messages.create(stop_sequences=[stop], **GREEDY)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert "".join(getattr(block, "text", "") for block in message.content) == whole.text[: whole.text.index(stop)]


def test_calls_whole_and_streamed(random_claude: anthropic.Anthropic) -> None:
    options: dict[str, Any] = dict(
        ASK, tools=CLIENT_TOOLS, tool_choice={"type": "tool", "name": "weather"}, max_tokens=900,
        extra_body={"seed": 3},
    )  # fmt: skip
    whole = random_claude.messages.create(**options)
    (block,) = whole.content
    assert block.type == "tool_use" and block.name == "weather" and whole.stop_reason == "tool_use"
    found: Any = block.input
    assert found["city"] in ("Paris", "Rome") and 1 <= found["days"] <= 9
    with random_claude.messages.stream(**options) as stream:
        streamed = stream.get_final_message()
    assert streamed.content[0].type == "tool_use" and streamed.content[0].input == found

    result = {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [result]},
    ]
    plain = {**options, "tool_choice": {"type": "none"}, "max_tokens": 3, "messages": messages}
    assert random_claude.messages.create(**plain).stop_reason in ("max_tokens", "end_turn")
    form = {"type": "json_schema", "schema": WEATHER}
    text: Any = random_claude.messages.create(
        **{**ASK, "max_tokens": 900, "extra_body": {"seed": 6, "output_config": {"format": form}}}
    ).content[0]
    assert json.loads(text.text)["city"] in ("Paris", "Rome")


def test_errors_are_the_clients_own_classes(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(**{**ASK, "model": "nope"})
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="4096") as long:
        claude.messages.create(**{**ASK, "messages": [{"role": "user", "content": "x " * 5000}]})
    assert long.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {**ASK, "max_tokens": None},
        {**ASK, "max_tokens": 0.5},
        {**ASK, "max_tokens": 0},
        {**ASK, "temperature": 1.1},
        {**ASK, "stop_sequences": [" "]},
        {**ASK, "thinking": {"type": "some"}},
        {**ASK, "messages": []},
        {**ASK, "temperature": -1},
        {**ASK, "n": 2},
        {**ASK, "container": "c"},
        {**ASK, "tool_choice": {"type": "any"}},
    ],
)
def test_error_envelope(server: LiveServer, body: Any) -> None:
    for stream in (False, True):
        response = server.post("/v1/messages", {**body, "stream": stream})
        assert response.status_code == 400, response.text
        found = response.json()
        assert set(found) == {"type", "error"} and set(found["error"]) == {"type", "message"}
        assert (found["type"], found["error"]["type"]) == ("error", "invalid_request_error")


def test_error_envelope_of_other_methods(server: LiveServer) -> None:
    assert httpx.get(f"{server.url}/v1/messages").json()["type"] == "error"
    assert server.post("/v1/messages/nope", {}).json()["error"]["type"] == "not_found_error"
