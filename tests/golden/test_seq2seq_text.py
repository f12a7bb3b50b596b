"""Text through encoder-decoder models, by /v1/completions and `headrace complete`, against transformers' generate."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from headrace import LLM
from headrace.core.cli import exits
from headrace.core.errors import RequestError
from live_server import LiveServer
from paged_seq2seq import SEQ2SEQ_CASES, load_oracle, make_seq2seq
from tiny_server_model import TEMPLATE
from tiny_tokenizers import train_byte_level

NUM_TOKENS = 12
TEXTS = ("the quick brown fox", "a dog", "one channel feeds any turbine, and any water")
OPTIONS = ("--kv-memory", "16MiB", "--dtype", "float32", "--threads", "1")


@pytest.fixture(scope="module", params=["bart", "t5"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Any, Any]]:
    """(folder, transformers' model, transformers' tokenizer); the tokenizer has a template that is not for it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    trained = train_byte_level()
    case = next(case for case in SEQ2SEQ_CASES if case.name == request.param)
    config = {**case.config, "vocab_size": trained.get_vocab_size(), "decoder_start_token_id": 2}
    case = dataclasses.replace(case, config=config)
    folder = make_seq2seq(case, tmp_path_factory.mktemp(case.name))
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=trained, chat_template=TEMPLATE)  # type: ignore[no-untyped-call]
    tokenizer.save_pretrained(folder)
    yield folder, load_oracle(folder), tokenizer
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def server(checkpoint: tuple[Path, Any, Any]) -> Iterator[LiveServer]:
    with LiveServer(checkpoint[0], *OPTIONS, "--served-model-name", "tiny", device="cpu") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def generated(oracle: Any, token_ids: list[int]) -> list[int]:
    """transformers' greedy tokens behind the decoder's start."""
    with torch.inference_mode():
        tokens = oracle.generate(
            torch.tensor([token_ids]),
            attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
            max_new_tokens=NUM_TOKENS,
            num_beams=1,
            do_sample=False,
            eos_token_id=None,
            use_cache=False,  # transformers sizes T5's by the encoder's layers, of which there are fewer here
        )
    found: list[int] = tokens[0, 1:].tolist()
    return found


def test_completions_are_those_of_transformers(checkpoint: tuple[Path, Any, Any], client: openai.OpenAI) -> None:
    _, oracle, tokenizer = checkpoint
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    expected = [generated(oracle, ids) for ids in prompts]
    assert len({tuple(tokens) for tokens in expected}) == len(TEXTS)  # the encoder's input is seen
    asked: dict[str, Any] = dict(model="tiny", max_tokens=NUM_TOKENS, temperature=0)
    body = {"ignore_eos": True, "return_token_ids": True}
    for prompt in (list(TEXTS), prompts):
        answer = client.completions.create(prompt=prompt, extra_body=body, **asked)
        assert [getattr(choice, "token_ids") for choice in answer.choices] == expected  # noqa: B009
    wanted = tokenizer.decode(expected[0], skip_special_tokens=True)
    chunks = client.completions.create(prompt=TEXTS[0], stream=True, extra_body={"ignore_eos": True}, **asked)
    assert "".join(chunk.choices[0].text for chunk in chunks) == wanted


def test_a_conversation_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="encoder-decoder model: it cannot chat"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hello"}])


def test_a_conversation_is_refused_in_python(checkpoint: tuple[Path, Any, Any]) -> None:
    options: dict[str, Any] = dict(device="reference", max_model_len=64)
    with LLM(str(checkpoint[0]), **options) as llm, pytest.raises(RequestError, match="it cannot chat") as caught:
        llm.chat([{"role": "user", "content": "Hello"}])
    assert caught.value.code == "not_supported"


def test_complete_is_transformers_too(checkpoint: tuple[Path, Any, Any], capsys: pytest.CaptureFixture[str]) -> None:
    folder, oracle, tokenizer = checkpoint
    expected = generated(oracle, tokenizer(TEXTS[0])["input_ids"])
    options = ["--temperature", "0", "--max-tokens", str(NUM_TOKENS), "--device", "cpu", *OPTIONS]
    assert exits.run(["complete", str(folder), TEXTS[0], "--json", *options]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["token_ids"] == expected[: len(result["token_ids"])]
    assert len(result["token_ids"]) == NUM_TOKENS or result["finish_reason"] == "stop"
    assert result["text"] == tokenizer.decode(result["token_ids"], skip_special_tokens=True)
