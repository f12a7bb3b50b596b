"""/v1/completions through OpenAI's client and as evaluation harnesses call it, against the Python API."""

import json
import math
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tokenizers

from headrace import LLM, SamplingParams
from headrace.core.text.infill import infill_prompt
from live_server import LiveServer
from tiny_server_model import tiny_server_model

PROMPT = "The quick brown fox"


def expected(llm: LLM, prompt: Any, **params: Any) -> Any:
    """What the Python API gives."""
    return llm.generate(prompt, SamplingParams(**{"temperature": 0.0, **params}))[0]


def test_text_usage_and_finish_reason(client: openai.OpenAI, llm: LLM) -> None:
    result = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=30, temperature=0)
    wanted = expected(llm, PROMPT, max_tokens=30)
    assert result.choices[0].text == wanted.outputs[0].text
    assert result.choices[0].finish_reason == wanted.outputs[0].finish_reason
    assert result.usage is not None
    assert result.usage.prompt_tokens == len(wanted.prompt_token_ids)
    assert result.usage.completion_tokens == len(wanted.outputs[0].token_ids)
    assert result.usage.total_tokens == result.usage.prompt_tokens + result.usage.completion_tokens
    assert result.id.startswith("cmpl-") and result.object == "text_completion" and result.model == "tiny"


def test_sixteen_tokens_unless_told_otherwise(client: openai.OpenAI) -> None:
    result = client.completions.create(model="tiny", prompt=PROMPT, extra_body={"ignore_eos": True})
    assert result.usage is not None and result.usage.completion_tokens == 16


@pytest.mark.parametrize("stop", [None, "a", ["\u00e9", "th", "zzz"]])
@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_is_the_whole(client: openai.OpenAI, stop: Any, n: int) -> None:
    options: dict[str, Any] = dict(
        model="tiny", prompt=PROMPT, max_tokens=60, temperature=0.9, seed=5, stop=stop, n=n, logprobs=2
    )
    client.completions.create(**options)  # so that both of the next find the prompt in the prefix cache
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(stream=True, stream_options={"include_usage": True}, **options))
    texts = [""] * n
    reasons: list[list[str]] = [[] for _ in range(n)]
    tokens: list[list[str]] = [[] for _ in range(n)]
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        tokens[choice.index] += (choice.logprobs and choice.logprobs.tokens) or []
        if choice.finish_reason is not None:
            reasons[choice.index].append(choice.finish_reason)
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs and choice.logprobs.tokens for choice in whole.choices]
    assert reasons == [[choice.finish_reason] for choice in whole.choices]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    if n > 1:
        assert len(set(texts)) == n


def test_no_usage_in_a_stream_unless_asked_for(server: LiveServer) -> None:
    text = server.post("/v1/completions", {"prompt": PROMPT, "stream": True, "max_tokens": 3}).text
    events = [event for event in text.split("\n\n") if event]
    assert events[-1] == "data: [DONE]"
    assert all("usage" not in json.loads(event.removeprefix("data: ")) for event in events[:-1])


def test_batches_of_text_and_of_token_ids(client: openai.OpenAI, llm: LLM) -> None:
    prompts = [PROMPT, "A headrace", "def main"]
    ids = [llm.tokenizer.encode(prompt) for prompt in prompts]
    wanted = [expected(llm, prompt, max_tokens=8).outputs[0].text for prompt in prompts]
    for batch in (prompts, ids):
        result = client.completions.create(model="tiny", prompt=batch, max_tokens=8, temperature=0, n=2)
        assert [choice.index for choice in result.choices] == list(range(6))
        assert [choice.text for choice in result.choices] == [text for text in wanted for _ in range(2)]
        assert result.usage is not None and result.usage.prompt_tokens == sum(map(len, ids))
    single = client.completions.create(model="tiny", prompt=ids[0], max_tokens=8, temperature=0)
    assert single.choices[0].text == wanted[0]


def test_cached_tokens_of_a_batch(server: LiveServer) -> None:
    """They are counted as the prompts are: of each, once."""
    prompts = [[token] * length for token, length in ((201, 70), (202, 40), (203, 5))]

    def cached(prompt: Any, n: int = 1) -> int:
        found = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, "n": n}).json()["usage"]
        count: int = found["prompt_tokens_details"]["cached_tokens"]
        assert count < found["prompt_tokens"]
        return count

    cached(prompts)
    single = [cached(prompt) for prompt in prompts]
    assert single[0] > single[1] > single[2] == 0
    assert cached(prompts) == cached(prompts, n=2) == sum(single)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_harness_contract(server: LiveServer, llm: LLM, max_tokens: int) -> None:
    """lm-eval's local-completions: token ids, echo, logprobs=1, batches; it reads choices as this test does."""
    contexts = ["The quick brown", "It's 12345"]
    wholes = ["The quick brown fox jumps", "It's 12345 degrees"]
    inputs = [llm.tokenizer.encode(whole) for whole in wholes]
    lengths = [len(llm.tokenizer.encode(context)) for context in contexts]
    body = dict(model="tiny", prompt=inputs, max_tokens=max_tokens, logprobs=1, echo=True, temperature=0, seed=1234)
    out = server.post("/v1/completions", body).json()
    for choice, length, ids, whole in zip(
        sorted(out["choices"], key=lambda c: c["index"]), lengths, inputs, wholes, strict=True
    ):
        found = choice["logprobs"]
        assert len(found["tokens"]) == len(ids) + max_tokens
        assert "".join(found["tokens"][: len(ids)]) == whole
        assert choice["text"].startswith(whole)
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        end = len(ids)
        scores = found["token_logprobs"][length:end]
        assert len(scores) == len(ids) - length and sum(scores) == pytest.approx(
            -math.log(llm.tokenizer.vocab_size) * len(scores)
        )
        for token, top in zip(found["tokens"][length:end], found["top_logprobs"][length:end], strict=True):
            assert token in top and max(top.values()) >= top[token]
        offsets = found["text_offset"]
        assert [whole[a:b] for a, b in zip(offsets, offsets[1:end], strict=False)] == found["tokens"][: end - 1]
    assert out["usage"]["completion_tokens"] == 2 * max_tokens


@pytest.mark.parametrize("echo", [False, True])
def test_prompts_are_cut_at_their_start(server: LiveServer, llm: LLM, echo: bool) -> None:
    ids = llm.tokenizer.encode("The quick brown fox jumps")
    text = llm.tokenizer.decode(ids[-3:])
    wanted = expected(llm, {"prompt_token_ids": ids[-3:]}, max_tokens=6).outputs[0].text
    for prompt in ("The quick brown fox jumps", ids, [99_999] * 5000 + ids):
        body = dict(prompt=prompt, max_tokens=6, temperature=0, echo=echo, truncate_prompt_tokens=3, logprobs=1)
        found = server.post("/v1/completions", body).json()
        assert found["usage"]["prompt_tokens"] == 3
        choice = found["choices"][0]
        assert choice["text"] == (text if echo else "") + wanted
        assert choice["logprobs"]["text_offset"][0] == (0 if echo else len(text))
    whole = {"max_tokens": 10, "ignore_eos": True, "truncate_prompt_tokens": -1}
    for prompts, kept in (([[5] * 5000, [7] * 9], 4086 + 9), ([[5] * 4095], 4086), ([[5]], 1)):
        found = server.post("/v1/completions", {"prompt": prompts, **whole}).json()
        assert found["usage"]["prompt_tokens"] == kept
        assert found["usage"]["completion_tokens"] == 10 * len(prompts)


def test_a_stream_has_all_token_ids(server: LiveServer, llm: LLM) -> None:
    """Those as well whose text is withheld, for a character or a stop string that they may begin."""
    ids = llm.tokenizer.encode(PROMPT)
    body = dict(prompt=PROMPT, max_tokens=60, seed=2, ignore_eos=True, return_token_ids=True, logprobs=None)
    whole = server.post("/v1/completions", body).json()["choices"][0]
    assert whole["prompt_token_ids"] == ids and len(whole["token_ids"]) == 60
    stop = whole["text"][:-1] + "\u2603"  # all of the text begins it
    chunks = server.post("/v1/completions", {**body, "stop": stop, "stream": True}).text.split("\n\n")[:-2]
    pieces = [json.loads(chunk.removeprefix("data: "))["choices"][0] for chunk in chunks]
    assert sum((piece["token_ids"] for piece in pieces), []) == whole["token_ids"]
    assert [piece["prompt_token_ids"] for piece in pieces] == [ids] + [None] * (len(pieces) - 1)
    assert "".join(piece["text"] for piece in pieces) == whole["text"]


def test_tokens_by_id(server: LiveServer, llm: LLM) -> None:
    body = dict(prompt=PROMPT, max_tokens=3, temperature=0, logprobs=1, echo=True, return_token_ids=True)
    choice = server.post("/v1/completions", {**body, "return_tokens_as_token_ids": True}).json()["choices"][0]
    found = choice["logprobs"]
    ids = [*llm.tokenizer.encode(PROMPT), *choice["token_ids"]]
    assert found["tokens"] == [f"token_id:{token}" for token in ids]
    assert all(token in top for token, top in zip(found["tokens"][1:], found["top_logprobs"][1:], strict=True))


def test_offsets_count_from_the_start_of_the_prompt(server: LiveServer) -> None:
    body = dict(prompt=PROMPT, max_tokens=30, logprobs=0, temperature=0, ignore_eos=True, skip_special_tokens=False)
    with_echo = server.post("/v1/completions", {**body, "echo": True}).json()["choices"][0]
    without = server.post("/v1/completions", body).json()["choices"][0]
    assert with_echo["text"] == PROMPT + without["text"]
    assert with_echo["logprobs"]["text_offset"][-30:] == without["logprobs"]["text_offset"]
    assert without["logprobs"]["text_offset"][0] == len(PROMPT)
    text, found = with_echo["text"], without["logprobs"]
    for offset, token in zip(found["text_offset"], found["tokens"], strict=True):
        if "\ufffd" not in token:
            assert text[offset:].startswith(token)


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"prompt": ""}, 400, "empty_prompt", None),
        ({"prompt": []}, 400, "empty_prompt", None),
        ({}, 400, "empty_prompt", "prompt"),
        ({"prompt": [5, 100_000]}, 400, "invalid_request", None),
        ({"prompt": {"a": 1}}, 400, "invalid_request", "prompt"),
        ({"prompt": [[1, "a"]]}, 400, "invalid_prompt", "prompt"),
        ({"prompt": "x", "max_tokens": -1}, 400, "invalid_sampling_params", "max_tokens"),
        ({"prompt": "x", "temperature": -1}, 400, "invalid_sampling_params", "temperature"),
        ({"prompt": "x", "n": 0}, 400, "invalid_sampling_params", "n"),
        ({"prompt": "x", "temperature": "hot"}, 400, "invalid_request", "temperature"),
        ({"prompt": "x", "logprobs": 1000}, 400, "invalid_sampling_params", "logprobs"),
        ({"prompt": "x", "suffix": "y"}, 400, "unsupported_parameter", "suffix"),
        ({"prompt": "x", "n": 3, "best_of": 2}, 400, "invalid_sampling_params", "best_of"),
        ({"prompt": "x", "logits_processors": ["nope"]}, 400, "unknown_logits_processor", None),
        ({"prompt": "x", "model": "gpt-4"}, 404, "model_not_found", "model"),
        ({"prompt": "x", "logit_bias": {"nan": 1}}, 400, "invalid_sampling_params", "logit_bias"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors(
    server: LiveServer, body: dict[str, Any], status: int, code: str, param: str | None, stream: bool
) -> None:
    response = server.post("/v1/completions", {**body, "stream": stream})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(response.json()) == {"error"} and set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param), error
    assert response.headers["content-type"] == "application/json"


def test_what_leaves_a_grammar_no_token_is_the_requests_fault(random_client: openai.OpenAI) -> None:
    options: dict[str, Any] = dict(model="tiny", prompt="The dog", temperature=0, max_tokens=9)
    form = {"structured_outputs": {"regex": "a{9}"}, "allowed_token_ids": [5]}
    with pytest.raises(openai.BadRequestError, match="allowed_token_ids leaves no token") as caught:
        random_client.completions.create(**options, extra_body=form)
    assert caught.value.code == "structured_output_failed"
    with pytest.raises(openai.BadRequestError, match="too many expressions") as caught:
        random_client.completions.create(**options, extra_body={"guided_regex": "a{1000000}"}, stream=True)
    assert caught.value.code == "invalid_structured_output"


def test_the_best_of_many(random_client: openai.OpenAI) -> None:
    """They are those of the same n whose tokens are the most likely on average."""
    options: dict[str, Any] = dict(model="tiny", prompt=[PROMPT, "A"], max_tokens=8, temperature=2, seed=3)
    every = random_client.completions.create(n=5, logprobs=0, **options)
    wanted: list[str] = []
    for group in (every.choices[:5], every.choices[5:]):
        means = {}
        for choice in group:
            assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
            values = [value for value in choice.logprobs.token_logprobs if value is not None]
            means[choice.text] = sum(values) / len(values)
        assert len(means) == 5
        wanted += sorted(means, key=lambda text: -means[text])[:2]
    best = random_client.completions.create(n=2, best_of=5, **options)
    assert [choice.text for choice in best.choices] == wanted
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is None for choice in best.choices)
    assert best.usage is not None and every.usage is not None
    assert best.usage.completion_tokens == every.usage.completion_tokens
    with pytest.raises(openai.BadRequestError, match="best_of"):
        random_client.completions.create(n=2, best_of=5, stream=True, **options)
    assert len(list(random_client.completions.create(n=1, best_of=1, stream=True, **options))) > 1


def test_filling_in_the_middle(tmp_path: Path) -> None:
    """The prompt is the one that the model's makers document, read by its tokenizer."""
    folder = tiny_server_model(tmp_path / "coder")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])
    backend.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": backend.get_vocab_size()}))
    before, after = "def main(args):\n    return ", "\n\nmain([])"
    ids = backend.encode(f"<|fim_prefix|>{before}<|fim_suffix|>{after}<|fim_middle|>").ids
    with LiveServer(folder, "--kv-memory", "16MiB") as server:

        def complete(**body: Any) -> Any:
            response = server.post("/v1/completions", {"max_tokens": 12, "temperature": 0, **body}).json()
            return response["choices"][0]["text"], response["usage"]["prompt_tokens"]

        assert complete(prompt=before, suffix=after) == complete(prompt=ids) != complete(prompt=before)
        assert complete(prompt=before, suffix="") == complete(prompt=before)
        for wrong in ({"prompt": [5]}, {"prompt": "x", "echo": True}):
            error = server.post("/v1/completions", {"suffix": after, **wrong}).json()["error"]
            assert (error["code"], error["param"]) == ("unsupported_parameter", "suffix")


def test_the_first_token_of_every_prompt_stays_first() -> None:
    assert infill_prompt([91, 92, 93], [1, 5, 6], [7], 1) == [1, 91, 5, 6, 92, 7, 93]


def test_a_prompt_that_is_too_long_names_both_numbers(server: LiveServer) -> None:
    response = server.post("/v1/completions", {"prompt": [5] * 4096, "stream": True})
    error = response.json()["error"]
    assert response.status_code == 400 and error["code"] == "context_length_exceeded"
    assert "4096" in error["message"] and "has 4096 tokens" in error["message"]


def test_output_ends_with_the_context(server: LiveServer) -> None:
    body = {"prompt": [5] * 4090, "max_tokens": 100, "ignore_eos": True}
    out = server.post("/v1/completions", body).json()
    assert out["usage"]["completion_tokens"] == 6 and out["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"prompt": "\xff"}', b'{"prompt": ' + b"[" * 5000, b"null"])
def test_bodies_that_are_no_request(server: LiveServer, body: bytes) -> None:
    response = httpx.post(f"{server.url}/v1/completions", content=body)
    assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"


def test_unknown_fields_and_nulls_are_taken(server: LiveServer) -> None:
    body = {"prompt": "x", "max_tokens": 2, "stop": None, "logit_bias": None, "user": "me", "frobnicate": 1}
    assert server.post("/v1/completions", body).status_code == 200


def test_logprobs_are_sorted_and_hold_the_chosen_token(server: LiveServer) -> None:
    found = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 5, "logprobs": 3}).json()
    top = found["choices"][0]["logprobs"]["top_logprobs"]
    assert len(top) == 5
    for token, each in zip(found["choices"][0]["logprobs"]["tokens"], top, strict=True):
        assert token in each
        assert list(each.values()) == sorted(each.values(), reverse=True)


def test_seeds_make_a_request_repeatable(client: openai.OpenAI) -> None:
    def texts(seed: int | None) -> str:
        result = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, temperature=1, seed=seed)
        return result.choices[0].text

    assert texts(1) == texts(1) != texts(2)
    assert texts(None) != texts(None)


def test_the_servers_seed_is_that_of_requests_without(model_folder: Path) -> None:
    def texts(seed: str) -> list[str]:
        with LiveServer(model_folder, "--seed", seed, "--kv-memory", "16MiB") as server:
            body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 1}
            return [server.post("/v1/completions", body).json()["choices"][0]["text"] for _ in range(2)]

    first = texts("1")
    assert texts("1") == first and not {*texts("2")} & {*first} and first[0] != first[1]
