"""Fields that no route has: names of other engines get ours, others are told, and what clients always send is not."""

import inspect
import json
import time
from typing import Any

import anthropic.types as blocks
import httpx
import openai.types.chat as chat
import openai.types.responses as items
import pytest
from anthropic.resources.messages import Messages
from openai.resources.chat.completions import Completions
from openai.resources.completions import Completions as TextCompletions
from openai.resources.responses import Responses
from openai.types.responses.response_input_item_param import FunctionCallOutput
from openai.types.shared_params import FunctionDefinition, Reasoning
from openai.types.shared_params.response_format_json_schema import JSONSchema

from headrace.core.errors import RequestError
from headrace.core.sampling.params import SamplingParams
from headrace.core.server.api_errors import ApiError
from headrace.core.server.nested_fields import unknown_within
from headrace.core.server.protocol.chat import ChatRequest
from headrace.core.server.protocol.completions import CompletionRequest
from headrace.core.server.protocol.messages import MessagesRequest
from headrace.core.server.protocol.responses import ResponsesRequest
from headrace.core.server.unknown_fields import HEADER, UnknownFields
from live_server import LiveServer

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
}


def post(server: LiveServer, path: str, **fields: Any) -> httpx.Response:
    """An answer to a good body with these fields besides."""
    return httpx.post(server.url + path, json={**BODIES[path], **fields}, timeout=60)


@pytest.mark.parametrize(
    ("path", "name", "value", "hint"),
    [
        ("/v1/chat/completions", "max_new_tokens", 5, "headrace calls it max_tokens"),
        ("/v1/chat/completions", "n_predict", 1, "headrace calls it max_tokens"),
        ("/v1/chat/completions", "max_output_tokens", 5, "headrace calls it max_tokens"),
        ("/v1/chat/completions", "repeat_penalty", 1.3, "headrace calls it repetition_penalty"),
        ("/v1/chat/completions", "do_sample", False, "headrace calls it temperature"),
        ("/v1/chat/completions", "temp", 1, "headrace calls it temperature"),
        ("/v1/chat/completions", "enable_thinking", False, '"chat_template_kwargs": {"enable_thinking": ...}'),
        ("/v1/chat/completions", "extra_body", {"top_k": 1}, "stands in the body itself"),
        ("/v1/completions", "num_predict", 5, "headrace calls it max_tokens"),
        ("/v1/completions", "grammar", "root ::= x", "headrace calls it structured_outputs"),
        ("/v1/completions", "stop_sequences", ["x"], "headrace calls it stop"),
        ("/v1/responses", "max_completion_tokens", 5, "headrace calls it max_output_tokens"),
        ("/v1/responses", "max_tokens", 5, "headrace calls it max_output_tokens"),
        ("/v1/responses", "response_format", {"type": "json_object"}, "text.format"),
        ("/v1/responses", "messages", MESSAGES, "/v1/chat/completions"),
        ("/v1/messages", "max_new_tokens", 5, "headrace calls it max_tokens"),
        ("/v1/messages", "structured_output", {"json": {}}, "headrace calls it output_config"),
    ],
)
def test_other_engines_names(server: LiveServer, path: str, name: str, value: object, hint: str) -> None:
    answer = post(server, path, **{name: value})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["message"].startswith(f"{name}: ") and hint in error["message"], error
    assert path == "/v1/messages" or (error["code"], error["param"]) == ("unknown_parameter", name)
    assert post(server, path, **{name: None}).status_code == 200


@pytest.mark.parametrize("path", BODIES)
def test_values_that_ask_for_nothing(server: LiveServer, path: str) -> None:
    """Clients of other engines send whole lists of parameters."""
    neutral = {"repeat_penalty": 1.0, "best_of": 1, "do_sample": True, "n_probs": 0, "grammar": "", "typical_p": 1.0}
    answer = post(server, path, **neutral)
    assert answer.status_code == 200, answer.text
    assert set(answer.headers[HEADER].split(", ")) >= {"repeat_penalty", "do_sample", "typical_p"}


def test_unknown_names_are_told(server: LiveServer) -> None:
    for stream in (False, True, False):
        answer = post(server, "/v1/chat/completions", temprature=0, stream=stream)
        assert (answer.status_code, answer.headers[HEADER]) == (200, "temprature")
    time.sleep(0.5)
    told = [line for line in server.lines if "temprature" in line]
    assert len(told) == 1 and "passed over; did you mean temperature" in told[0]
    odd = post(server, "/v1/completions", **{"x\r\nset-cookie: a\x00\u2028": 1, "y" * 10_000: 1})
    assert odd.headers[HEADER] == f"x\\r\\nset-cookie: a\\x00\\u2028, {'y' * 64}" and "set-cookie" not in odd.headers
    many = post(server, "/v1/completions", **{f"x{i}": i for i in range(1000)})
    assert many.headers[HEADER].endswith("x7, ...")
    assert HEADER not in post(server, "/v1/completions").headers


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (Completions.create, ChatRequest),
        (TextCompletions.create, CompletionRequest),
        (Responses.create, ResponsesRequest),
        (Messages.create, MessagesRequest),
    ],
)
def test_what_the_clients_have_fields_for(call: Any, kind: Any) -> None:
    """No field of OpenAI's and Anthropic's own clients is an error, and what changes no answer is not told."""
    ours = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    sent = {name: 5 for name in inspect.signature(call).parameters if name not in ours}
    UnknownFields().check(json.dumps(sent).encode(), kind.__struct_fields__, "/")
    usual = dict.fromkeys(("metadata", "store", "service_tier", "prompt_cache_key", "user", "verbosity"), "x")
    assert UnknownFields().check(json.dumps(usual).encode(), kind.__struct_fields__, "/") == ""


FUNCTION = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("path", "fields", "told", "hint"),
    [
        (
            "chat/completions",
            {"stream_options": {"include_usge": True}, "stream": True},
            "stream_options.include_usge",
            "include_usage",
        ),
        (
            "chat/completions",
            {"tools": [{**FUNCTION, "function": {"name": "f", "paramters": {}}}]},
            "tools.function.paramters",
            "parameters",
        ),
        ("chat/completions", {"tools": [{**FUNCTION, "strict": True}]}, "tools.strict", ""),
        (
            "chat/completions",
            {"response_format": {"type": "text", "json_schema": {"name": "x", "strct": True}}},
            "response_format.json_schema.strct",
            "strict",
        ),
        (
            "chat/completions",
            {"messages": [*MESSAGES, {**MESSAGES[0], "tool_call": 1}]},
            "messages.tool_call",
            "tool_calls",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache": 1}]}] * 2},
            "messages.content.cache",
            "",
        ),
        (
            "chat/completions",
            {"chat_template_kwargs": {"enable_thinkng": 1}},
            "chat_template_kwargs.enable_thinkng",
            "",
        ),
        (
            "completions",
            {"stream_options": {"include_usage": True, "usage": 1}, "stream": True},
            "stream_options.usage",
            "include_usage",
        ),
        ("responses", {"text": {"fromat": {"type": "text"}}}, "text.fromat", "format"),
        ("responses", {"reasoning": {"efort": "low"}}, "reasoning.efort", "effort"),
        (
            "responses",
            {"tools": [{"type": "function", "name": "f", "descripton": "x"}]},
            "tools.descripton",
            "description",
        ),
        ("messages", {"output_config": {"efort": "low"}}, "output_config.efort", "effort"),
        (
            "messages",
            {"tools": [{"name": "f", "input_schema": {}, "input_exmples": []}]},
            "tools.input_exmples",
            "input_examples",
        ),
    ],
)
def test_what_is_unknown_within_a_field(
    server: LiveServer, path: str, fields: dict[str, Any], told: str, hint: str
) -> None:
    answer = post(server, f"/v1/{path}", **fields)
    assert (answer.status_code, answer.headers[HEADER]) == (200, told)
    time.sleep(0.3)
    assert [hint in line for line in server.lines if f"field={told} " in line] == [True]


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        (
            "chat/completions",
            {"response_format": {"type": "json_object", "schema": {"type": "null"}}},
            'response_format.schema: send {"type": "json_schema"',
        ),
        (
            "chat/completions",
            {"tools": [{**FUNCTION, "function": {"name": "f", "input_schema": {}}}]},
            "tools.function.input_schema: headrace calls it parameters",
        ),
        ("responses", {"text": {"format": {"type": "json_shema"}}}, "text.format needs the type text, "),
        ("responses", {"text": {"format": {"type": "json_schema", "shema": {}}}}, "text.format: json_schema needs a"),
        ("messages", {"system": [{"type": "text", "txt": "x"}]}, "system has a block of type 'text' without a text"),
    ],
)
def test_what_within_a_field_cannot_be_passed_over(
    server: LiveServer, path: str, fields: dict[str, Any], reason: str
) -> None:
    answer = post(server, f"/v1/{path}", **fields)
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize(
    ("place", "kinds"),
    [
        ("messages", [
            *(chat.ChatCompletionUserMessageParam, chat.ChatCompletionAssistantMessageParam),
            *(chat.ChatCompletionToolMessageParam, chat.ChatCompletionSystemMessageParam),
        ]),
        ("messages.content", [
            *(chat.ChatCompletionContentPartTextParam, chat.ChatCompletionContentPartImageParam),
            *(chat.ChatCompletionContentPartRefusalParam, blocks.TextBlockParam, blocks.ImageBlockParam),
            *(blocks.ToolUseBlockParam, blocks.ToolResultBlockParam, blocks.ThinkingBlockParam),
        ]),
        ("messages.content.source", [blocks.Base64ImageSourceParam, blocks.URLImageSourceParam]),
        ("messages.tool_calls", [chat.ChatCompletionMessageFunctionToolCallParam]),
        ("input", [
            *(items.EasyInputMessageParam, items.ResponseOutputMessageParam, items.ResponseFunctionToolCallParam),
            *(items.ResponseReasoningItemParam, FunctionCallOutput),
        ]),
        ("input.content", [
            *(items.ResponseInputTextParam, items.ResponseInputImageParam, items.ResponseOutputTextParam),
        ]),
        ("tools", [chat.ChatCompletionFunctionToolParam, items.FunctionToolParam, blocks.ToolParam]),
        ("tools.function", [FunctionDefinition]),
        ("tool_choice", [
            *(chat.ChatCompletionNamedToolChoiceParam, chat.ChatCompletionAllowedToolChoiceParam),
            *(items.ToolChoiceFunctionParam, items.ToolChoiceAllowedParam),
            *(blocks.ToolChoiceToolParam, blocks.ToolChoiceAutoParam),
        ]),
        ("response_format.json_schema", [JSONSchema]),
        ("stream_options", [chat.ChatCompletionStreamOptionsParam]),
        ("text", [items.ResponseTextConfigParam]),
        ("text.format", [items.ResponseFormatTextJSONSchemaConfigParam]),
        ("reasoning", [Reasoning]),
        ("output_config", [blocks.OutputConfigParam]),
        ("output_config.format", [blocks.JSONOutputFormatParam]),
        ("thinking", [blocks.ThinkingConfigEnabledParam, blocks.ThinkingConfigAdaptiveParam]),
    ],
)  # fmt: skip
def test_what_the_clients_types_hold_is_known(place: str, kinds: list[Any]) -> None:
    for kind in kinds:
        value: Any = dict.fromkeys(kind.__annotations__, 5)
        for name in reversed(place.split(".")[1:]):
            value = {name: [value]}
        field = place.partition(".")[0]
        assert list(unknown_within(field, [value], lambda _name: False)) == [], kind


def test_a_hostile_body_is_read_soon() -> None:
    body = json.dumps({f"field{i}": "x" for i in range(1_000_000)}).encode()
    started_s = time.monotonic()
    assert UnknownFields().check(body, ChatRequest.__struct_fields__, "/").startswith("field0, field1")
    assert time.monotonic() - started_s < 30


def test_every_parameter_has_a_name() -> None:
    """What the library calls a parameter is never passed over in silence where it has another name."""
    for name in ("max_tokens", "structured_output", "logprobs"):
        assert hasattr(SamplingParams(), name)
        with pytest.raises((ApiError, RequestError), match=name):
            UnknownFields().check(json.dumps({name: 5}).encode(), ("max_output_tokens", "text", "top_logprobs"), "/")
