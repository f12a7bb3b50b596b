"""Tools and forms of output through OpenAI's client; a model with random weights writes what grammars let."""

import json
from typing import Any

import openai
import pytest

from weather_tools import TOOLS, WEATHER

MESSAGES: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_forced_call_whole_and_streamed(random_client: openai.OpenAI, seed: int) -> None:
    options: dict[str, Any] = dict(
        model="tiny",
        messages=MESSAGES,
        tools=TOOLS,
        max_tokens=900,
        temperature=1,
        seed=seed,
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    whole = random_client.chat.completions.create(**options).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.tool_calls is not None
    (call,) = whole.message.tool_calls
    assert call.type == "function" and call.function.name == "weather" and call.id
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Paris", "Rome") and 1 <= arguments["days"] <= 9

    chunks = [chunk.choices[0] for chunk in random_client.chat.completions.create(stream=True, **options)]
    deltas = [piece for chunk in chunks for piece in chunk.delta.tool_calls or ()]
    first = deltas[0]
    assert (first.index, first.type) == (0, "function") and first.id
    assert first.function is not None and (first.function.name, first.function.arguments) == ("weather", "")
    for piece in deltas[1:]:
        assert piece.index == 0 and piece.id is None and piece.type is None
        assert piece.function is not None and piece.function.name is None
    streamed = "".join((piece.function and piece.function.arguments) or "" for piece in deltas)
    assert json.loads(streamed) == arguments
    assert all(len(chunk.delta.tool_calls or ()) <= 1 for chunk in chunks)
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_can_be_left_out(random_client: openai.OpenAI, stream: bool) -> None:
    form = {"structured_outputs": {"choice": ["<think>\nHm.\n</think>\n\nYes."]}}
    for wanted in (True, False):
        options: dict[str, Any] = dict(model="tiny", messages=MESSAGES, tools=TOOLS, max_tokens=90)
        made: Any = random_client.chat.completions.create(
            stream=stream, extra_body={**form, "include_reasoning": wanted}, **options
        )
        parts = [chunk.choices[0].delta for chunk in made] if stream else [made.choices[0].message]
        assert "".join(part.content or "" for part in parts) == "Yes."
        thoughts = "".join(part.to_dict().get("reasoning_content") or "" for part in parts)
        assert thoughts == ("Hm." if wanted else "")


def finished(client: openai.OpenAI, **options: Any) -> list[list[Any]]:
    """The calls of answers that came to their end; random weights may also think until the tokens are used up."""
    found = []
    for seed in range(8):
        result = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=600, temperature=1, seed=seed, **options
        )
        choice = result.choices[0]
        if choice.finish_reason != "length":
            assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
            found.append(choice.message.tool_calls)
    assert found
    return found


def test_required_calls_some_tool(random_client: openai.OpenAI) -> None:
    for calls in finished(random_client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False):
        (call,) = calls
        assert call.type == "function" and call.function.name in ("weather", "now")


def test_only_allowed_tools_are_called(random_client: openai.OpenAI) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    for calls in finished(random_client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False):
        (call,) = calls
        assert call.type == "function" and call.function.name == "now"
    none_left: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}
    with pytest.raises(openai.BadRequestError):
        random_client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice=none_left)


@pytest.mark.parametrize("name", ["auto", "none", "required"])
def test_a_tool_with_the_name_of_a_mode(random_client: openai.OpenAI, name: str) -> None:
    tools: list[Any] = [*TOOLS, {"type": "function", "function": {"name": name}}]
    choice: Any = {"type": "function", "function": {"name": name}}
    for calls in finished(random_client, tools=tools, tool_choice=choice):
        assert [call.function.name for call in calls] == [name]


def test_schemas_that_cannot_be_kept_to_are_named(random_client: openai.OpenAI) -> None:
    many = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2000)}}
    for schema, reason in ((many, "2000 properties"), ({"type": "nope"}, "Invalid type: nope")):
        tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        with pytest.raises(openai.BadRequestError) as caught:
            random_client.chat.completions.create(
                model="tiny", messages=MESSAGES, tools=tools, tool_choice="required"
            )
        assert "the schema of a tool" in caught.value.message and reason in caught.value.message
        assert "start:" not in caught.value.message


def test_forms_of_output(random_client: openai.OpenAI) -> None:
    def answer(**options: Any) -> str:
        result = random_client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=900, temperature=1, seed=6, **options
        )
        assert result.choices[0].finish_reason == "stop"
        return result.choices[0].message.content or ""

    schema = {"name": "weather", "strict": True, "schema": WEATHER}
    found = json.loads(answer(response_format={"type": "json_schema", "json_schema": schema}))
    assert found["city"] in ("Paris", "Rome") and 1 <= found["days"] <= 9
    assert answer(extra_body={"structured_outputs": {"choice": ["yes", "no"]}}) in ("yes", "no")
    assert answer(extra_body={"guided_regex": "[0-9]{4}"}).isdecimal()


@pytest.mark.parametrize(
    "options",
    [
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nope"}}},
        {"tools": TOOLS, "tool_choice": "sometimes"},
        {"tool_choice": "required"},
        {"tools": [{"type": "function", "function": {"name": "two words"}}]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}}},
        {"response_format": {"type": "json_schema"}},
        {"extra_body": {"guided_regex": "(", "stream": True}},
        {"extra_body": {"guided_regex": "a", "guided_choice": ["b"]}},
        {"extra_body": {"structured_outputs": {}}},
        {"extra_body": {"structured_outputs": {"regex": None}}},
    ],
)
def test_bad_tools_and_forms_are_refused_at_once(random_client: openai.OpenAI, options: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError):
        random_client.chat.completions.create(model="tiny", messages=MESSAGES, **options)


@pytest.mark.parametrize("name", ["whitespace_pattern", "disable_any_whitespace", "structural_tag"])
def test_what_vllm_takes_beside_a_form_is_named(random_client: openai.OpenAI, name: str) -> None:
    form = {"structured_outputs": {"json": WEATHER, name: " "}}
    with pytest.raises(openai.BadRequestError, match=f"structured_outputs: {name}: ") as caught:
        random_client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=form)
    assert caught.value.code == "unsupported_parameter" and caught.value.param == "structured_outputs"


def test_what_vllm_leaves_off_asks_for_nothing(random_client: openai.OpenAI) -> None:
    def answer(form: dict[str, Any]) -> str | None:
        result = random_client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=9, seed=6, extra_body={"structured_outputs": form}
        )
        return result.choices[0].message.content

    off = {"disable_any_whitespace": False, "disable_fallback": True, "whitespace_pattern": None, "_backend": None}
    assert answer({"choice": ["yes"], "json_object": False, **off}) == "yes"
    plain = random_client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=9, seed=6)
    assert answer({"json_object": False}) == plain.choices[0].message.content


def test_earlier_calls_reach_the_template(random_client: openai.OpenAI) -> None:
    messages: list[Any] = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    result = random_client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, max_tokens=3)
    assert result.usage is not None and result.usage.completion_tokens <= 3
