"""Anthropic's requests in chat's words."""

from typing import Any

import pytest

from headrace.core.errors import RequestError
from headrace.core.server.messages.blocks import chat_request
from headrace.core.server.protocol.messages import MessagesRequest


def request(**fields: Any) -> MessagesRequest:
    return MessagesRequest(max_tokens=9, **{"messages": [{"role": "user", "content": "Hi"}], **fields})


def test_a_conversation_with_tools() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "now", "input": {"zone": "CET"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "noon"}]}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    chat = chat_request(
        request(
            system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}],
            messages=[
                {"role": "user", "content": "Time?"},
                {"role": "user", "content": [{"type": "text", "text": "Now?"}]},
                {"role": "assistant", "content": [thought, {"type": "text", "text": "Wait."}, use]},
                {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
            ],
            tools=[{"name": "now", "description": "d", "input_schema": {"type": "object"}}],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            thinking={"type": "disabled"},
            stop_sequences=["END"],
        )
    )
    call = {"id": "t1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "CET"}'}}
    assert chat.messages == [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "Time?\nNow?"},
        {"role": "assistant", "content": "Wait.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "name": "now", "content": "noon"},
        {"role": "user", "content": "Well?"},
    ]
    function = {"name": "now", "description": "d", "parameters": {"type": "object"}}
    assert chat.tools == [{"type": "function", "function": function}]
    assert (chat.tool_choice, chat.parallel_tool_calls, chat.stop, chat.max_tokens) == ("required", False, ["END"], 9)
    assert chat.chat_template_kwargs == {"enable_thinking": False}
    assert not chat.continue_final_message


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": ["x"]}]},
        {"system": [{"type": "image"}]},
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        {"tools": [{"name": "now"}]},
        {"tools": [{"name": "now", "input_schema": None}]},
        {"tools": [{"name": "now", "input_schema": [1]}]},
        {"tool_choice": {"type": "some"}},
        {"output_config": {"format": {"type": "xml"}}},
    ],
)
def test_wrong_requests(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        chat_request(request(**fields))
