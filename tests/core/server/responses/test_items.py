"""Items to messages: what one turn is, and what is refused."""

from typing import Any

import pytest

from headrace.core.errors import RequestError
from headrace.core.server.responses.items import read_items, to_messages

CALL: dict[str, Any] = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"}


def test_a_text_is_a_message_of_the_user() -> None:
    (item,) = read_items("Hi")
    assert item["id"].startswith("msg_") and item["role"] == "user"
    assert to_messages("Be brief.", [item]) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]


def test_reasoning_text_and_calls_of_a_turn_are_one_message() -> None:
    thought = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]}
    result = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "noon"}]}
    items = read_items([{"role": "user", "content": "Time?"}, thought, said, CALL, result, said, said])
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    assert to_messages(None, items) == [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": "Wait.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "name": "now", "content": "noon"},
        {"role": "assistant", "content": "Wait."},
        {"role": "assistant", "content": "Wait."},
    ]


@pytest.mark.parametrize(
    "item",
    [
        {"type": "computer_call"},
        {},
        {"role": "robot", "content": "x"},
        {"role": "user"},
        {"role": "user", "content": 3},
        {"type": "function_call", "call_id": "c"},
        {"type": "function_call_output", "call_id": "c"},
        {"role": "user", "content": [3]},
    ],
)
def test_wrong_items(item: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as wrong:
        to_messages(None, read_items([item]))
    assert wrong.value.code == "invalid_input"
