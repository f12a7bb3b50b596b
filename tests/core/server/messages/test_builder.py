"""Events of answers that think, talk and call, put together by Anthropic's own client."""

import json
from typing import Any

import anthropic
import httpx2
import msgspec
import pytest
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

from headrace.core.server.formats.formats import builtin_formats
from headrace.core.server.formats.tools import Tool
from headrace.core.server.frames import Output
from headrace.core.server.generation import Completion, Generation
from headrace.core.server.messages.builder import MessageBuilder
from headrace.core.server.protocol.messages import Message, MessageUsage
from headrace.core.server.routes.text import named_event

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
ANSWER = (
    "<think>\nThe user wants two things.\n</think>\n\nLet me look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


def make_builder() -> MessageBuilder:
    format = builtin_formats()["hermes"]
    parser = format.new_parser(prompt="<|im_start|>assistant\n", tools=[Tool(name="weather"), Tool(name="now")])
    return MessageBuilder(Message(id="msg_1", model="m", content=[], usage=MessageUsage(input_tokens=3)), parser)


def make_generation() -> Generation:
    generation = Generation("msg_1", key="", on_done=lambda generation: None)
    completion = Completion(generation=generation, index=0, prompt_token_ids=[1, 2, 3], sampling_params={})
    generation.num_output_tokens = 30
    generation.completions.append(completion)
    generation.num_cached_tokens = 1
    return generation


def run(answer: str, size: int, finish_reason: Any = "stop", stop_reason: str | None = None) -> tuple[Any, list[Any]]:
    """The message as the client puts it together, and the events."""
    builder = make_builder()
    last = Output(request_id="", text="", token_ids=[], finish_reason=finish_reason, stop_reason=stop_reason)
    events = builder.start()
    for at in range(0, len(answer), size):
        events += builder.push(Output(request_id="", text=answer[at : at + size], token_ids=[]))
    events += builder.finish(make_generation(), last, 30)
    body = b"".join(map(named_event, events))
    transport = httpx2.MockTransport(
        lambda request: httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=body)
    )
    http = anthropic.DefaultHttpxClient(transport=transport)
    with anthropic.Anthropic(base_url="http://x", api_key="none", max_retries=0, http_client=http) as client:
        with client.messages.stream(model="m", max_tokens=30, messages=[{"role": "user", "content": "x"}]) as stream:
            message = stream.get_final_message()
    read = [json.loads(msgspec.json.encode(event)) for event in events if event.type != "ping"]
    for event in read:
        EVENTS.validate_python(event)
    return message, read


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_answer_that_thinks_talks_and_calls(size: int) -> None:
    message, events = run(ANSWER, size)
    thinking, text, weather, now = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "The user wants two things.")
    assert (text.type, text.text) == ("text", "Let me look.")
    assert (weather.type, weather.name, weather.input) == ("tool_use", "weather", {"city": "Paris"})
    assert (now.type, now.name, now.input) == ("tool_use", "now", {})
    assert message.stop_reason == "tool_use"
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (2, 1)
    assert message.usage.output_tokens == 30
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    blocks = [event["index"] for event in events if event["type"] == "content_block_start"]
    assert blocks == [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("finish_reason", "stop_reason", "wanted"),
    [("stop", None, "end_turn"), ("stop", "END", "stop_sequence"), ("length", None, "max_tokens")],
)
def test_why_it_ended(finish_reason: str, stop_reason: str | None, wanted: str) -> None:
    message, _ = run("Half an ans", 4, finish_reason, stop_reason)
    assert (message.stop_reason, message.stop_sequence) == (wanted, stop_reason)
    assert message.content[0].text == "Half an ans"
    assert run("", 1)[0].content == []


def test_arguments_that_are_cut_off() -> None:
    builder = make_builder()
    builder.start()
    builder.push(Output(request_id="", text='<tool_call>\n{"name": "weather", "arguments": {"ci', token_ids=[]))
    last = Output(request_id="", text="", token_ids=[], finish_reason="length")
    builder.finish(make_generation(), last, 30)
    (block,) = msgspec.to_builtins(builder.message.content)
    assert block["input"] == {"invalid_json": '{"ci'}
