"""Adapters by the name of a request's model, on real arithmetic, against the same model in this process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from headrace import LLM, SamplingParams
from live_server import LiveServer
from lora_files import ALL, write_lora

OPTIONS: dict[str, Any] = {"kv_memory": "16MiB", "load_format": "dummy", "threads": 1, "device": "cpu"}


@pytest.fixture(scope="module")
def adapters(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    config = AutoConfig.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    parent = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two")):
        write_lora(parent / name, model, ALL, seed=seed, lora_alpha=60)
    return {name: str(parent / name) for name in ("one", "two")}


@pytest.fixture(scope="module")
def lora_server(model_folder: Path, adapters: dict[str, str]) -> Iterator[LiveServer]:
    options = [text for name, path in adapters.items() for text in ("--lora", f"{name}={path}")]
    options += ["--kv-memory", "16MiB", "--load-format", "dummy", "--threads", "1"]
    with LiveServer(model_folder, *options, device="cpu") as running:
        yield running


@pytest.fixture(scope="module")
def lora_client(lora_server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{lora_server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def lora_llm(model_folder: Path, adapters: dict[str, str]) -> Iterator[LLM]:
    with LLM(str(model_folder), lora=adapters, **OPTIONS) as made:
        yield made


def test_each_name_answers_as_its_adapter(lora_client: openai.OpenAI, lora_llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    more: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
    messages: Any = [{"role": "user", "content": "Hello there"}]
    texts = set()
    for name in ("tiny", "one", "two"):
        lora = "" if name == "tiny" else name
        [want] = lora_llm.generate("Once upon a time", params, lora=lora)
        answer = lora_client.completions.create(model=name, prompt="Once upon a time", **more)
        assert (answer.model, answer.choices[0].text) == (name, want.outputs[0].text)
        [want] = lora_llm.chat(messages, params, lora=lora)
        chat = lora_client.chat.completions.create(model=name, messages=messages, **more)
        assert chat.choices[0].message.content == want.outputs[0].text
        texts.add(answer.choices[0].text)
    assert len(texts) == 3


def test_other_protocols_take_the_name_too(lora_server: LiveServer, lora_client: openai.OpenAI) -> None:
    texts = {}
    client = anthropic.Anthropic(base_url=lora_server.url, api_key="none", max_retries=0)
    for name in ("tiny", "one"):
        messages: Any = [{"role": "user", "content": "Hello there"}]
        response = lora_client.responses.create(model=name, input="Hello there", temperature=0.0, max_output_tokens=9)
        cold: Any = {"temperature": 0}
        message: Any = client.messages.create(model=name, messages=messages, max_tokens=9, extra_body=cold)
        chat = lora_client.chat.completions.create(model=name, messages=messages, temperature=0.0, max_tokens=9)
        texts[name] = response.output_text
        assert response.output_text == message.content[0].text == chat.choices[0].message.content
    assert texts["tiny"] != texts["one"]


def test_the_list_of_models_has_adapters(lora_client: openai.OpenAI, adapters: dict[str, str]) -> None:
    cards = {card.id: card.to_dict() for card in lora_client.models.list().data}
    assert list(cards) == ["tiny", "one", "two"]
    assert cards["tiny"]["parent"] is None
    assert (cards["one"]["parent"], cards["one"]["root"]) == ("tiny", adapters["one"])
    assert lora_client.models.retrieve("two").to_dict() == cards["two"]
    with pytest.raises(openai.NotFoundError, match="no model 'three'; this server has tiny, one, two"):
        lora_client.completions.create(model="three", prompt="x")


def test_adapters_come_and_go(model_folder: Path, adapters: dict[str, str], lora_llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    body: dict[str, Any] = {"prompt": "Once upon", "temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
    want = {name: lora_llm.generate("Once upon", params, lora=name)[0].outputs[0].text for name in ("", *adapters)}
    env = {"HEADRACE_MAX_LORAS": "1", "HEADRACE_MAX_LORA_RANK": "4", "HEADRACE_LOAD_LORAS": "1"}
    options = ["--kv-memory", "16MiB", "--load-format", "dummy", "--threads", "1"]
    with LiveServer(model_folder, *options, env=env, device="cpu") as server:

        def text(name: str) -> str:
            found: str = server.post("/v1/completions", {**body, "model": name}).json()["choices"][0]["text"]
            return found

        def change(verb: str, name: str, **more: str) -> tuple[int, Any]:
            response = server.post(f"/v1/{verb}_lora_adapter", {"lora_name": name, **more})
            return response.status_code, response.json()

        assert server.post("/v1/completions", {**body, "model": "one"}).status_code == 404
        for name in ("one", "two", "one"):
            status, answer = change("load", name, lora_path=adapters[name])
            assert (status, [card["id"] for card in answer["data"]]) == (200, ["tiny", name])
            assert (text(name), text("tiny")) == (want[name], want[""])
            if name == "two":
                status, answer = change("load", "one", lora_path=adapters["one"])
                assert (status, answer["error"]["code"]) == (400, "no_lora_place")
                server.engine.kill()  # another process loads what this one had
                assert (text(name), text("tiny")) == (want[name], want[""])
            assert change("unload", name)[0] == 200
        status, answer = change("unload", "one")
        assert (status, answer["error"]["code"]) == (404, "lora_not_found")
        status, answer = change("load", "tiny", lora_path=adapters["one"])
        assert (status, answer["error"]["code"]) == (400, "lora_exists")
        status, answer = change("load", "bad", lora_path=str(model_folder))
        assert status == 400 and "no adapter_config.json" in answer["error"]["message"]
        assert change("load", "bad", lora_path="")[0] == 400


def test_adapters_are_loaded_only_where_that_is_allowed(lora_server: LiveServer, adapters: dict[str, str]) -> None:
    body = {"lora_name": "three", "lora_path": adapters["one"]}
    response = lora_server.post("/v1/load_lora_adapter", body)
    assert (response.status_code, response.json()["error"]["code"]) == (403, "not_allowed")


def test_the_model_and_an_adapter_have_different_names(model_folder: Path, adapters: dict[str, str]) -> None:
    options = ["--lora", f"tiny={adapters['one']}", "--load-format", "dummy", "--kv-memory", "16MiB"]
    server = LiveServer(model_folder, *options, device="cpu", wait=False)
    assert server.process.wait(60) == 2
    assert any("the model and an adapter are both called tiny" in line for line in server.lines)
