"""Events of answers that think, talk and call, held against the types of OpenAI's own client, strictly."""

import json
from typing import Any

import msgspec
import openai.types.responses as types
import pytest
from pydantic import TypeAdapter

from headrace.core.server.api_errors import ApiError
from headrace.core.server.formats.formats import builtin_formats
from headrace.core.server.formats.tools import Tool
from headrace.core.server.frames import Output
from headrace.core.server.generation import Completion, Generation
from headrace.core.server.protocol.responses import (
    ReasoningOptions,
    ResponseEvent,
    ResponseObject,
    TextOptions,
)
from headrace.core.server.responses.builder import ResponseBuilder

EVENTS: TypeAdapter[Any] = TypeAdapter(types.ResponseStreamEvent)
ANSWER = (
    "<think>\nThe user wants two things.\n</think>\n\nLet me look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


def make_builder() -> ResponseBuilder:
    response = ResponseObject(
        id="resp_1",
        created_at=1,
        status="in_progress",
        background=False,
        instructions=None,
        max_output_tokens=None,
        max_tool_calls=None,
        metadata={},
        model="m",
        output=[],
        parallel_tool_calls=True,
        previous_response_id=None,
        prompt_cache_key=None,
        reasoning=ReasoningOptions(),
        safety_identifier=None,
        service_tier="default",
        store=True,
        temperature=1.0,
        text=TextOptions(format={"type": "text"}),
        tool_choice="auto",
        tools=[],
        top_logprobs=0,
        top_p=1.0,
        truncation="disabled",
        user=None,
    )
    format = builtin_formats()["hermes"]
    parser = format.new_parser(prompt="<|im_start|>assistant\n", tools=[Tool(name="weather"), Tool(name="now")])
    return ResponseBuilder(response, parser, num_top_logprobs=None, count_tokens=lambda text: len(text.split()))


def make_generation() -> Generation:
    generation = Generation("resp_1", key="", on_done=lambda generation: None)
    completion = Completion(generation=generation, index=0, prompt_token_ids=[1, 2, 3], sampling_params={})
    generation.num_output_tokens = 30
    generation.completions.append(completion)
    return generation


def as_client_reads(event: ResponseEvent) -> Any:
    """The event as the client's type; raises for a field that is missing or of another type."""
    return EVENTS.validate_python(json.loads(msgspec.json.encode(event)))


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_answer_that_thinks_talks_and_calls(size: int) -> None:
    builder = make_builder()
    events = [as_client_reads(event) for event in builder.start()]
    for at in range(0, len(ANSWER), size):
        found = builder.push(Output(request_id="", text=ANSWER[at : at + size], token_ids=[]))
        events += [as_client_reads(event) for event in found]
    events += [as_client_reads(event) for event in builder.finish(make_generation(), "tool_calls")]

    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    parts = ["content_part.added", "content_part.done"]
    wanted = ["created", "in_progress", "output_item.added", parts[0]]
    wanted += ["reasoning_text.delta", "reasoning_text.done", parts[1], "output_item.done"]
    wanted += ["output_item.added", parts[0], "output_text.delta", "output_text.done", parts[1], "output_item.done"]
    calls = ["function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    wanted += ["output_item.added", *calls, "output_item.added", *calls, "completed"]
    assert [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before] == wanted

    response = events[-1].response
    reasoning, message, weather, now = response.output
    assert reasoning.content[0].text == "The user wants two things."
    assert message.content[0].text == response.output_text == "Let me look."
    assert (weather.name, json.loads(weather.arguments)) == ("weather", {"city": "Paris"})
    assert (now.name, json.loads(now.arguments)) == ("now", {})
    assert {item.status for item in response.output} == {"completed"}
    for index, item in enumerate(response.output):
        mine = [event for event in events if getattr(event, "output_index", None) == index]
        assert {getattr(event, "item_id", item.id) for event in mine} == {item.id}
        deltas = "".join(event.delta for event in mine if event.type.endswith(".delta"))
        assert deltas == (item.arguments if item.type == "function_call" else item.content[0].text)
        assert mine[0].item.status == "in_progress" and mine[-1].item == item
    assert response.usage.output_tokens_details.reasoning_tokens == 5
    assert (response.usage.input_tokens, response.usage.total_tokens) == (3, 33)


def test_an_answer_that_is_cut_off_and_one_that_is_empty() -> None:
    builder = make_builder()
    builder.start()
    builder.push(Output(request_id="", text="Half an ans", token_ids=[]))
    last = as_client_reads(builder.finish(make_generation(), "length")[-1])
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert last.response.output[0].status == "incomplete"

    empty = make_builder()
    empty.start()
    last = as_client_reads(empty.finish(make_generation(), "stop")[-1])
    assert last.response.status == "completed" and last.response.output_text == ""


def test_an_answer_that_breaks_off() -> None:
    builder = make_builder()
    builder.start()
    builder.push(Output(request_id="", text="Half an ans", token_ids=[]))
    (failed,) = builder.fail(ApiError(500, "the engine failed", code="server_error"))
    read = as_client_reads(failed)
    assert read.type == "response.failed" and read.response.error.message == "the engine failed"
    assert read.response.output[0].status == "incomplete"
