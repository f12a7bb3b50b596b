"""/v1/chat/completions through OpenAI's client, against the Python API; the events of a stream, byte by byte."""

import json
from typing import Any

import httpx
import openai
import pytest

from headrace import LLM, SamplingParams
from headrace.core.server.routes.text import event
from live_server import LiveServer

MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello, world"}]


def events(text: str) -> list[Any]:
    """The events of a stream; [DONE] as it is."""
    found = []
    for part in text.split("\n\n")[:-1]:
        assert part.startswith("data: "), part
        data = part.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def test_an_answer(client: openai.OpenAI, llm: LLM) -> None:
    result = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=20, temperature=0)
    wanted = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=20))[0]
    choice = result.choices[0]
    assert choice.message.content == wanted.outputs[0].text
    assert (choice.message.role, choice.finish_reason) == ("assistant", wanted.outputs[0].finish_reason)
    assert result.usage is not None
    assert result.usage.prompt_tokens == len(wanted.prompt_token_ids)
    assert result.usage.completion_tokens == len(wanted.outputs[0].token_ids)
    assert result.object == "chat.completion" and result.id.startswith("chatcmpl-")
    timings = result.to_dict()["timings"]
    assert isinstance(timings, dict) and 0 <= timings["queue_s"] <= timings["ttft_s"] <= timings["e2e_s"]


@pytest.mark.parametrize("n", [1, 3])
def test_events_of_a_stream(server: LiveServer, n: int) -> None:
    body = dict(messages=MESSAGES, max_tokens=25, n=n, temperature=1, seed=3, ignore_eos=True)
    server.post("/v1/chat/completions", body)  # so that both of the next find the prompt in the prefix cache
    whole = server.post("/v1/chat/completions", body).json()
    response = server.post(
        "/v1/chat/completions", {**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = events(response.text)
    assert found[-1] == "[DONE]" and "[DONE]" not in found[:-1]
    last = found[-2]
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert [chunk["usage"] for chunk in found[:-2]] == [None] * (len(found) - 2)
    assert {chunk["id"] for chunk in found[:-1]} == {last["id"]}
    assert {chunk["object"] for chunk in found[:-1]} == {"chat.completion.chunk"}
    for index in range(n):
        mine = [chunk["choices"][0] for chunk in found[:-2] if chunk["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in mine[1:])
        text = "".join(choice["delta"].get("content", "") for choice in mine)
        assert text == whole["choices"][index]["message"]["content"]
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["length"]
        assert mine[-1]["delta"] == {}


def test_logprobs_with_bytes(client: openai.OpenAI) -> None:
    options: dict[str, Any] = dict(
        model="tiny", messages=MESSAGES, max_tokens=30, temperature=0, logprobs=True, top_logprobs=2
    )
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].logprobs is not None
    content = whole.choices[0].logprobs.content
    assert content is not None and whole.usage is not None and len(content) == whole.usage.completion_tokens
    raw = b"".join(bytes(entry.bytes or ()) for entry in content if not entry.token.startswith("<|"))
    assert raw.decode(errors="replace") == whole.choices[0].message.content
    for entry in content:
        assert entry.token in [top.token for top in entry.top_logprobs]
        assert bytes(entry.bytes or ()).decode(errors="replace") == entry.token
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(stream=True, **options):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert streamed == content


def test_no_logprobs_without_asking(server: LiveServer) -> None:
    body = {"messages": MESSAGES, "max_tokens": 2}
    assert server.post("/v1/chat/completions", body).json()["choices"][0]["logprobs"] is None
    refused = server.post("/v1/chat/completions", {**body, "top_logprobs": 2})
    assert refused.status_code == 400


def test_no_half_character_in_a_delta(client: openai.OpenAI, llm: LLM) -> None:
    """Bytes of a character come in several tokens; a delta has it whole, or U+FFFD where the whole text has it."""
    options: dict[str, Any] = dict(model="tiny", messages=MESSAGES, max_tokens=400, temperature=0.5, seed=9)
    whole = client.chat.completions.create(**options).choices[0].message.content
    deltas = [
        chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(stream=True, **options)
    ]
    assert "".join(deltas) == whole


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"messages": []}, "invalid_messages", "messages"),
        ({"messages": [{"content": "x"}]}, "invalid_messages", "messages"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
                    }
                ]
            },
            "not_supported",
            None,
        ),
        ({}, "invalid_request", "messages"),
        ({"messages": MESSAGES, "functions": [{}]}, "unsupported_parameter", "functions"),
        ({"messages": MESSAGES, "web_search_options": {}}, "unsupported_parameter", "web_search_options"),
        ({"messages": MESSAGES, "use_beam_search": True}, "unsupported_parameter", "use_beam_search"),
        ({"messages": MESSAGES, "truncate_prompt_tokens": 0}, "invalid_sampling_params", "truncate_prompt_tokens"),
        ({"messages": MESSAGES, "response_format": {"type": "xml"}}, "invalid_response_format", "response_format"),
        (
            {"messages": MESSAGES, "structured_outputs": {"xml": 1}},
            "invalid_response_format",
            "structured_outputs",
        ),
        ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "invalid_sampling_params", "top_logprobs"),
        ({"messages": MESSAGES, "logprobs": True, "top_logprobs": -1}, "invalid_sampling_params", "top_logprobs"),
        (
            {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True},
            "invalid_request",
            "add_generation_prompt",
        ),
    ],
)
def test_errors(server: LiveServer, body: dict[str, Any], code: str, param: str | None) -> None:
    for stream in (False, True):
        response = server.post("/v1/chat/completions", {**body, "stream": stream})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["code"], error["param"]) == (code, param)


def test_only_streams_have_options(server: LiveServer) -> None:
    options = {"max_tokens": 2, "stream_options": {"include_usage": True}}
    for path, body in (("/v1/chat/completions", {"messages": MESSAGES}), ("/v1/completions", {"prompt": "x"})):
        response = server.post(path, {**body, **options})
        assert response.status_code == 400 and response.json()["error"]["param"] == "stream_options"


def test_errors_are_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        client.chat.completions.create(model="nope", messages=MESSAGES)
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as other:
        client.embeddings.create(model="tiny", input="x")
    assert other.value.code == "unsupported_by_model"


def test_the_last_message_can_be_continued(server: LiveServer, llm: LLM) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "The quick"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 9}
    found = server.post("/v1/chat/completions", {**body, "temperature": 0}).json()
    params = SamplingParams(temperature=0, max_tokens=9)
    wanted = llm.chat(messages, params, continue_final_message=True)[0].outputs[0].text
    assert found["choices"][0]["message"]["content"] == wanted


def test_events_have_no_line_end_but_their_own() -> None:
    """Clients that cut text with str.splitlines, as httpx does, must find whole events."""
    value = {"text": "".join(map(chr, range(1, 0x3000)))}
    line, empty = event(value).decode().splitlines()
    assert empty == "" and json.loads(line.removeprefix("data: ")) == value


def test_usage_all_along(server: LiveServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, more in (("chat/completions", {"messages": MESSAGES}), ("completions", {"prompt": "x"})):
        body = {**more, "max_tokens": 9, "ignore_eos": True, "stream": True, "stream_options": options}
        found = events(server.post(f"/v1/{path}", body).text)[:-1]
        counts = [chunk["usage"]["completion_tokens"] for chunk in found]
        assert counts == sorted(counts) and counts[-1] == 9
        assert found[-1]["choices"] == []


def test_a_stream_has_the_tokens_of_prompt_and_answer_too(server: LiveServer) -> None:
    body = dict(messages=MESSAGES, max_tokens=40, n=2, seed=4, ignore_eos=True, stop=["\u00e9\u00e9"])
    body |= dict(return_token_ids=True, prompt_logprobs=1)
    whole = server.post("/v1/chat/completions", body).json()
    tokens = server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    assert whole["prompt_token_ids"] == tokens and len(whole["prompt_logprobs"]) == len(tokens)
    found = events(server.post("/v1/chat/completions", {**body, "stream": True}).text)[:-1]
    assert found[0]["prompt_token_ids"] == tokens
    assert all("prompt_token_ids" not in chunk for chunk in found[1:])
    (prompt,) = [chunk["prompt_logprobs"] for chunk in found if "prompt_logprobs" in chunk]
    assert [entry and set(entry) for entry in prompt] == [entry and set(entry) for entry in whole["prompt_logprobs"]]
    for choice in whole["choices"]:
        mine = [chunk["choices"][0] for chunk in found if chunk["choices"][0]["index"] == choice["index"]]
        assert sum((piece.get("token_ids", []) for piece in mine), []) == choice["token_ids"] != []


@pytest.mark.parametrize(
    "content", ["The quick", [{"type": "text", "text": "The "}, {"type": "text", "text": "quick"}]]
)
def test_the_message_that_is_continued_can_be_given_back(server: LiveServer, content: Any) -> None:
    body: dict[str, Any] = {"messages": [*MESSAGES, {"role": "assistant", "content": content}], "max_tokens": 9}
    body |= {"continue_final_message": True, "temperature": 0}
    alone = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    body["echo"] = True
    assert server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"] == "The quick" + alone
    found = events(server.post("/v1/chat/completions", {**body, "stream": True}).text)[:-1]
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in found]
    assert deltas[:2] == ["", "The quick"] and "".join(deltas) == "The quick" + alone
    asked = {**body, "messages": MESSAGES, "continue_final_message": False}
    plain = {**asked, "echo": False}
    first, second = (server.post("/v1/chat/completions", each).json()["choices"][0] for each in (asked, plain))
    assert first["message"] == second["message"]


def test_a_conversation_is_cut_at_its_start(server: LiveServer, llm: LLM) -> None:
    tokens = server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    body = {"messages": MESSAGES, "max_tokens": 9, "temperature": 0, "truncate_prompt_tokens": 7}
    found = server.post("/v1/chat/completions", body).json()
    wanted = (
        llm.generate({"prompt_token_ids": tokens[-7:]}, SamplingParams(temperature=0, max_tokens=9))[0]
        .outputs[0]
        .text
    )
    assert found["usage"]["prompt_tokens"] == 7 and found["choices"][0]["message"]["content"] == wanted


def test_log_probabilities_by_token_id(server: LiveServer) -> None:
    body = dict(messages=MESSAGES, max_tokens=12, temperature=0, logprobs=True, top_logprobs=2, return_token_ids=True)
    plain = server.post("/v1/chat/completions", body).json()["choices"][0]
    named = server.post("/v1/chat/completions", {**body, "return_tokens_as_token_ids": True}).json()["choices"][0]
    content = named["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in plain["token_ids"]]
    for entry, other in zip(content, plain["logprobs"]["content"], strict=True):
        assert entry["bytes"] == other["bytes"]
        assert entry["token"] in [top["token"] for top in entry["top_logprobs"]]


def test_names_of_template_variables(server: LiveServer) -> None:
    """Whatever a variable of the template is called, it is no argument of ours; what the body says itself counts."""

    def prompt(status: int = 200, **fields: Any) -> Any:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "return_token_ids": True, **fields}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
        assert answer.status_code == status, answer.text
        return answer.json().get("prompt_token_ids")

    plain, bare = prompt(), prompt(add_generation_prompt=False)
    assert len(bare) < len(plain)
    assert prompt(chat_template_kwargs={"self": 1, "messages": [], "tools": 5, "chat": 1, "kwargs": 2}) == plain
    assert prompt(chat_template_kwargs={"add_generation_prompt": False}) == bare
    assert prompt(chat_template_kwargs={"add_generation_prompt": False}, add_generation_prompt=True) == plain
    for name in ("template", "image_placeholder"):
        prompt(400, chat_template_kwargs={name: "x"})
    prompt(400, chat_template_kwargs={"add_generation_prompt": 5})
