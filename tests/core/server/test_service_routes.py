"""Health, models, tokens, metrics, version, the description of the API, unknown routes."""

import httpx
import openai
import pytest

import headrace
from headrace import LLM
from headrace.core.server.app import route_table
from live_server import LiveServer


def test_health(server: LiveServer) -> None:
    for path in ("/livez", "/readyz", "/health"):
        response = httpx.get(server.url + path)
        assert (response.status_code, response.json()) == (200, {"status": "ok", "reason": ""})
    assert httpx.get(f"{server.url}/version").json() == {"version": headrace.__version__}


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny" and model.to_dict()["max_model_len"] == 4096
    assert client.models.retrieve("tiny") == model
    slash = client.get("/models/", cast_to=httpx.Response)
    assert slash.json()["data"][0]["id"] == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_tokens_there_and_back(server: LiveServer, llm: LLM) -> None:
    text = "It's 12345 degrees; \u00fcber caf\u00e9s"
    found = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert found["tokens"] == llm.tokenizer.encode(text)
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 4096)
    assert len(found["token_strs"]) == found["count"]
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": text}
    messages = [{"role": "user", "content": "hi"}]
    chat = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert chat == llm.tokenizer.encode(llm.render_chat(messages), add_special_tokens=False)
    assert server.post("/tokenize", {}).status_code == 400
    assert server.post("/detokenize", {"tokens": [10**6]}).status_code == 400


def test_unknown_routes_and_methods_have_the_envelope(server: LiveServer) -> None:
    for response, status in (
        (httpx.get(f"{server.url}/v1/nope"), 404),
        (httpx.get(f"{server.url}/v1/chat/completions"), 405),
        (httpx.request("FROB", f"{server.url}/metrics"), None),
    ):
        assert status is None or response.status_code == status
        assert set(response.json()) == {"error"}
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_wrong_method_is_told_all_that_there_are(server: LiveServer) -> None:
    allowed = httpx.put(f"{server.url}/v1/responses/x").headers["allow"].split(", ")
    assert sorted(allowed) == ["DELETE", "GET", "HEAD"]
    assert "security" not in httpx.get(f"{server.url}/openapi.json").json()


def test_what_the_model_cannot_do(server: LiveServer) -> None:
    for name in ("embeddings", "rerank", "score", "classify"):
        response = server.post(f"/v1/{name}", {})
        assert response.status_code == 404
        assert name in response.json()["error"]["message"]


def test_description_of_the_api(server: LiveServer) -> None:
    found = httpx.get(f"{server.url}/openapi.json").json()
    assert found["openapi"].startswith("3.1")
    paths = {spec.path.replace(":path}", "}") for spec in route_table()} | {"/openapi.json"}
    assert set(found["paths"]) == paths
    schemas = found["components"]["schemas"]
    assert "messages" in schemas["ChatRequest"]["required"]
    for operations in found["paths"].values():
        for operation in operations.values():
            reference = operation["responses"]["default"]["content"]["application/json"]["schema"]["$ref"]
            assert reference.rpartition("/")[2] in schemas
            assert operation["summary"]


def test_metrics(server: LiveServer) -> None:
    before = server.metrics()
    out = server.post("/v1/completions", {"prompt": "The quick", "max_tokens": 7, "ignore_eos": True}).json()
    after = server.metrics()

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert grown("vllm:generation_tokens_total") == 7
    assert grown("vllm:prompt_tokens_total") == out["usage"]["prompt_tokens"]
    assert grown("vllm:request_success_total|finished_reason=length") == 1
    assert grown("vllm:time_to_first_token_seconds_count") == 1
    assert grown("vllm:inter_token_latency_seconds_count") == 6
    assert grown("vllm:e2e_request_latency_seconds_sum") == pytest.approx(out["timings"]["e2e_s"], abs=0.05)
    times = [grown(f"vllm:request_{name}_time_seconds_sum") for name in ("prefill", "decode", "inference")]
    assert times[0] + times[1] == pytest.approx(times[2])
    server.post("/v1/completions", {"prompt": "The quick", "max_tokens": 7, "n": 3, "ignore_eos": True})
    before, after = after, server.metrics()
    assert grown("vllm:request_params_n_sum") == 3
    assert grown("vllm:request_generation_tokens_sum") == 21
    assert grown("vllm:request_max_num_generation_tokens_sum") == 7
    assert after["vllm:num_requests_running"] == 0 and after["vllm:kv_cache_usage_perc"] == 0


def test_one_log_line_for_each_request(server: LiveServer) -> None:
    out = server.post("/v1/completions", {"prompt": "The quick", "max_tokens": 7, "ignore_eos": True}).json()
    line = server.wait_for(out["id"])
    assert line is not None
    (logged,) = [line for line in server.lines if out["id"] in line]
    for part in ("reason=length", "output_tokens=7", "prompt_tokens=", "ttft_s=", "itl_s=", "queue_s=", "e2e_s="):
        assert part in logged


def test_the_log_proposes_a_request_that_works(server: LiveServer) -> None:
    answer = server.follow_example()
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"], answer.text
