"""Bodies that are wrong in every field, way and depth: always an answer in the envelope, never a 500."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from headrace.core.server.protocol.chat import ChatRequest
from headrace.core.server.protocol.common import SamplingFields
from headrace.core.server.protocol.completions import CompletionRequest
from headrace.core.server.protocol.messages import MessagesRequest
from headrace.core.server.protocol.responses import ResponsesRequest
from headrace.core.server.protocol.service import DetokenizeRequest, TokenizeRequest
from live_server import LiveServer

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "hi", "max_tokens": 2}),
    "/v1/chat/completions": (ChatRequest, {"messages": MESSAGES, "max_tokens": 2}),
    "/v1/responses": (ResponsesRequest, {"input": "hi", "max_output_tokens": 2}),
    "/v1/messages": (MessagesRequest, {"messages": MESSAGES, "max_tokens": 2}),
    "/tokenize": (TokenizeRequest, {"prompt": "hi"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1, 2]}),
}
VALUES: list[Any] = [
    *(2**70, -(2**70), 2**63 - 1, -1, 0, 1.5, True, "x", "\u0000"),
    *([], [None], [2**70], [""], {}, {"type": "x"}, {"a": 2**70}, [{}]),
]


@pytest.fixture(scope="module")
def http(random_server: LiveServer) -> Iterator[httpx.Client]:
    """One connection for all."""
    with httpx.Client(base_url=random_server.url, timeout=60) as client:
        yield client


def is_an_answer(response: httpx.Response) -> bool:
    """True for success, and for an error of the client's in an envelope."""
    if response.status_code == 200:
        return True
    return 400 <= response.status_code < 500 and bool(response.json()["error"]["message"])


@pytest.mark.parametrize("path", ROUTES)
def test_every_field_with_every_value(http: httpx.Client, random_server: LiveServer, path: str) -> None:
    kind, body = ROUTES[path]
    shared = SamplingFields.__struct_fields__ if path != "/v1/completions" else ()
    for name in kind.__struct_fields__:
        for value in VALUES if name not in shared else ():
            if name.startswith("max_") and value == 2**63 - 1:
                continue  # right, but long
            response = http.post(path, json={**body, name: value})
            assert is_an_answer(response), (name, value, response.text)
    random_server.wait_idle()


def test_fields_of_the_token_routes(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    whole, plain = (
        http.post("/detokenize", json={"tokens": ids, "skip_special_tokens": skips}).json()["prompt"]
        for skips in (False, True)
    )
    assert whole.startswith("<|im_start|>user\nhi<|im_end|>")
    assert plain == whole.replace("<|im_start|>", "").replace("<|im_end|>", "")
    assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == whole
    for path, body, param in (
        ("/tokenize", {"messages": MESSAGES, "chat_template": "{{ messages }}"}, "chat_template"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": 5}, "chat_template"),
        ("/detokenize", {"tokens": ids, "skip_special_tokens": "yes"}, "skip_special_tokens"),
        ("/detokenize", {"tokens": ids, "skip_special_tokens": 1}, "skip_special_tokens"),
    ):
        response = http.post(path, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_the_field_is_named(http: httpx.Client) -> None:
    for name, value in (("top_p", 7), ("stop", [""]), ("seed", 2**70), ("n", 0), ("logprobs", 99), ("suffix", "x")):
        error = http.post("/v1/completions", json={"prompt": "hi", name: value}).json()["error"]
        assert error["param"] == name, error
    error = http.post("/v1/chat/completions", json={"messages": [{"role": "user"}]}).json()["error"]
    assert error["param"] == "messages"


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"{", b"[]", b"null", b"5", b"{'prompt': 'x'}", b'{"prompt": "x"} more', b"\xef\xbb\xbf{}"),
        *(b'{"prompt": "x", "temperature": %s}' % number for number in (b"NaN", b"Infinity", b"-Infinity", b"1e999")),
        *(b'{"prompt": "%s"}' % text for text in (b"\xff", b"\\ud800", b"\\udc00", b"x\x00", b"\\x")),
        *(b'{"prompt": "x", "max_tokens": %s}' % number for number in (b"9" * 5000, b"01", b"1.", b"+1", b"0x1")),
        *(b'{"prompt": %s}' % (b"[" * depth + b"]" * depth) for depth in (300, 900, 100_000)),
    ],
)
def test_bodies_that_are_no_request(http: httpx.Client, raw: bytes) -> None:
    response = http.post("/v1/completions", content=raw)
    assert response.status_code == 400, response.text
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("depth", [100, 480, 950])
def test_deep_bodies(http: httpx.Client, depth: int) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth
    schema = '{"properties":{"a":' * (depth // 2) + "{}" + "}}" * (depth // 2)
    function = {"name": "x", "arguments": deep}
    call = json.dumps({"id": "c", "type": "function", "function": function})
    user = '{"role":"user","content":"x"}'
    chat, tool = f'"messages":[{user}],"max_tokens":2', '{"type":"function","function":{"name":"x","parameters":%s}}'
    bodies = [
        ("/v1/chat/completions", f'{{"messages":[{{"role":"user","content":"x","foo":{deep}}}],"max_tokens":2}}'),
        (
            "/v1/chat/completions",
            f'{{"messages":[{user},{{"role":"assistant","tool_calls":[{call}]}}],"max_tokens":2}}',
        ),
        ("/v1/chat/completions", f'{{{chat},"tools":[{tool % schema}]}}'),
        ("/v1/chat/completions", f'{{{chat},"tools":[{tool % schema}],"tool_choice":"required"}}'),
        ("/v1/chat/completions", f'{{{chat},"chat_template_kwargs":{{"a":{deep}}}}}'),
        ("/v1/completions", f'{{"prompt":"x","max_tokens":2,"guided_json":{schema}}}'),
        ("/v1/completions", f'{{"prompt":"x","max_tokens":2,"vllm_xargs":{{"a":{deep}}}}}'),
        ("/v1/responses", f'{{"input":[{{"role":"user","content":"x","foo":{deep}}}],"max_output_tokens":2}}'),
        ("/v1/messages", f'{{{chat},"tools":[{{"name":"x","input_schema":{schema}}}]}}'),
        ("/tokenize", f'{{"messages":[{{"role":"user","content":"x","foo":{deep}}}]}}'),
    ]
    for path, body in bodies:
        response = http.post(path, content=body.encode())
        assert is_an_answer(response), (path, body[:100], response.text)
        if depth == 950 and "foo" in body and path != "/v1/responses":
            assert "deep" in response.json()["error"]["message"] or response.status_code == 200


def test_the_last_of_equal_keys_counts(http: httpx.Client) -> None:
    response = http.post(
        "/v1/completions", content=b'{"prompt": "x", "max_tokens": 1, "max_tokens": 3, "ignore_eos": true}'
    )
    assert response.json()["usage"]["completion_tokens"] == 3


def test_empty_forms_are_not_passed_over(http: httpx.Client) -> None:
    forms: list[dict[str, Any]] = [{"guided_choice": []}, {"guided_regex": ""}, {"guided_grammar": ""}]
    for form in forms:
        assert http.post("/v1/completions", json={"prompt": "x", **form}).status_code == 400
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": None}}
    body = {"messages": MESSAGES, "response_format": schema}
    assert http.post("/v1/chat/completions", json=body).status_code == 400
    assert http.post("/v1/chat/completions", json={"messages": MESSAGES, "modalities": ["audio"]}).status_code == 400
