"""complete and chat: what they pass to the model, what they print; once for real, against transformers."""

import dataclasses
import io
import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from headrace.core.cli import chat, complete, exits
from headrace.core.config import EngineConfig
from headrace.core.sampling.params import SamplingParams
from headrace.core.stages import CompletionOutput, RequestOutput, RequestTimings
from tiny_checkpoints import greedy_tokens, save_tiny
from tiny_tokenizers import train_byte_level


class FakeLLM:
    """Answers with the words it is given, one more in each output; remembers what it was asked."""

    default_sampling_params = SamplingParams(temperature=0.6, top_k=40)

    def __init__(self, words: Sequence[str] = ("Hello", " wor", "ld"), *, has_chat_template: bool = True) -> None:
        self.words = words
        self.has_chat_template = has_chat_template
        self.asked: list[tuple[Any, SamplingParams]] = []
        self.built = SimpleNamespace(model=SimpleNamespace(name="fake"))
        self.config: EngineConfig | None = None
        self.num_stopped = 0
        self.on_word: dict[int, Any] = {}

    def __enter__(self) -> "FakeLLM":
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def stream(self, prompt: Any, params: SamplingParams, lora: str) -> Iterator[RequestOutput]:
        self.asked.append((json.loads(json.dumps(prompt)), params))
        for index in range(len(self.words)):
            is_last = index == len(self.words) - 1
            if index in self.on_word:
                self.on_word.pop(index)()
            completion = CompletionOutput(
                index=0,
                text="".join(self.words[: index + 1]),
                token_ids=list(range(index + 1)),
                finish_reason="stop" if is_last else None,
            )
            timings = RequestTimings(arrival_s=1.0, scheduled_s=1.5, first_token_s=2.0, finished_s=4.0)
            try:
                yield RequestOutput(
                    request_id="0",
                    prompt=None,
                    prompt_token_ids=[1, 2, 3],
                    outputs=[completion],
                    finished=is_last,
                    timings=timings if is_last else None,
                )
            except GeneratorExit:
                self.num_stopped += 1
                raise


@pytest.fixture(autouse=True)
def restore_interrupt_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    llm = FakeLLM()

    def start(config: EngineConfig) -> FakeLLM:
        llm.config = config
        return llm

    monkeypatch.setattr(complete, "start_llm", start)
    monkeypatch.setattr(chat, "start_llm", start)
    return llm


def _stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


# ---- complete -----------------------------------------------------------------------------------------------
def test_an_instruct_model_is_asked_through_its_template(fake: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert exits.run(["complete", "Who are you?"]) == 0
    assert fake.asked == [([{"role": "user", "content": "Who are you?"}], FakeLLM.default_sampling_params)]
    shown = capsys.readouterr()
    assert shown.out == "Hello world\n"
    assert "finished prompt_tokens=3 output_tokens=3 finish_reason=stop ttft_s=1 decode_tokens_per_s=1" in shown.err
    assert fake.config is not None and fake.config.model.model == ""


@pytest.mark.parametrize("has_template", [True, False])
def test_raw_and_base_models_get_the_prompt_itself(fake: FakeLLM, has_template: bool) -> None:
    fake.has_chat_template = has_template
    assert exits.run(["complete", "org/name", "Who", *(["--raw"] if has_template else [])]) == 0
    assert fake.asked[0][0] == "Who"
    assert fake.config is not None and fake.config.model.model == "org/name"


def test_only_what_was_given_replaces_the_models_defaults(fake: FakeLLM) -> None:
    options = ["--temperature", "0", "--max-tokens", "7", "--stop", "a", "--stop", "b", "--seed", "5"]
    assert exits.run(["complete", "x", *options]) == 0
    expected = dataclasses.replace(FakeLLM.default_sampling_params, temperature=0.0, max_tokens=7, stop=("a", "b"))
    assert fake.asked[0][1] == expected
    assert fake.config is not None and fake.config.scheduler.seed == 5


def test_json_is_one_object(fake: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert exits.run(["complete", "--json", "x"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "model": "fake",
        "prompt": "x",
        "text": "Hello world",
        "token_ids": [0, 1, 2],
        "finish_reason": "stop",
        "stop_reason": None,
        "num_prompt_tokens": 3,
        "num_cached_tokens": 0,
        "num_output_tokens": 3,
        "ttft_s": 1.0,
        "decode_tokens_per_s": 1.0,
    }


@pytest.mark.parametrize(
    ("data", "prompt"), [("caf\u00e9 \U0001f600\n", "caf\u00e9 \U0001f600"), ("a\n\n", "a\n"), (" x", " x")]
)
def test_prompt_from_stdin(fake: FakeLLM, monkeypatch: pytest.MonkeyPatch, data: str, prompt: str) -> None:
    _stdin(monkeypatch, data.encode("utf-8"))
    assert exits.run(["complete", "-"]) == 0
    assert fake.asked[0][0] == [{"role": "user", "content": prompt}]


@pytest.mark.parametrize(
    ("arguments", "data", "reason"),
    [
        (["complete", "-"], b"caf\xe9", "stdin is not UTF-8: byte 0xe9 at offset 3"),
        (["complete", "-"], b"", "the prompt is empty"),
        (["complete", "-"], b"\n", "the prompt is empty"),
        (["complete", ""], b"", "the prompt is empty"),
        (["complete", "org/name", ""], b"", "the prompt is empty"),
        (["complete", "caf\udce9"], b"", "the prompt is not UTF-8 at character 3"),
        (["complete"], b"", "no prompt was given"),
        (["complete", "a", "b", "c"], b"", "quote the prompt"),
        (["complete", "--temperature", "-1", "x"], b"", "temperature must be 0 or more, got -1.0"),
        (["complete", "--top-p", "0", "x"], b"", "top_p must be in (0, 1], got 0.0"),
        (["complete", "--max-tokens", "x", "x"], b"", "'x' is not a valid integer"),
        (["complete", "--stop", "", "x"], b"", "stop strings must not be empty"),
        (["complete", "--dtype", "int1", "x"], b"", "--dtype must be one of auto"),
        (["complete", "--config", "/no/such.toml", "x"], b"", "cannot read the configuration file /no/such.toml"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_loaded(
    fake: FakeLLM,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    data: bytes,
    reason: str,
) -> None:
    _stdin(monkeypatch, data)
    assert exits.run(arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ")
    assert reason in shown.err
    assert shown.out == ""
    assert fake.config is None


# ---- chat -------------------------------------------------------------------------------------------------
def _contents(asked: tuple[Any, SamplingParams]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in asked[0]]


def test_a_conversation_is_remembered_until_reset(
    fake: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _stdin(monkeypatch, b"one\n\n/what\ntwo\n/reset\nthree\n/exit\nfour\n")
    assert exits.run(["chat", "--system", "Be brief.", "--max-tokens", "9"]) == 0
    system, answer = ("system", "Be brief."), ("assistant", "Hello world")
    assert [_contents(asked) for asked in fake.asked] == [
        [system, ("user", "one")],
        [system, ("user", "one"), answer, ("user", "two")],
        [system, ("user", "three")],
    ]
    assert {asked[1].max_tokens for asked in fake.asked} == {9}
    shown = capsys.readouterr()
    assert shown.out == "Hello world\n" * 3
    assert "no such command" in shown.err


def test_interrupt_stops_the_answer_and_not_the_chat(
    fake: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.on_word[1] = lambda: os.kill(os.getpid(), signal.SIGINT)
    _stdin(monkeypatch, b"one\ntwo\n")
    assert exits.run(["chat"]) == 0
    assert fake.num_stopped == 1
    assert _contents(fake.asked[1]) == [("user", "one"), ("assistant", "Hello wor"), ("user", "two")]
    shown = capsys.readouterr()
    assert shown.out == "Hello wor\nHello world\n"
    assert "(stopped)" in shown.err


@pytest.mark.parametrize("arguments", [["chat"], ["complete", "Who?"]])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_escape_sequences_of_a_model_reach_no_terminal(
    arguments: list[str],
    is_terminal: bool,
    fake: FakeLLM,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake.words = ("\x1b]0;title", "\x07\x1b[2Jgr\u00fcn \u4f60\U0001f600\t", "\x9b31m\x7f\r\nend")
    _stdin(monkeypatch, b"one\n")
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    assert exits.run(arguments) == 0
    spelled = "\\x1b]0;title\\x07\\x1b[2Jgr\u00fcn \u4f60\U0001f600\t\\x9b31m\\x7f\nend\n"
    assert capsys.readouterr().out == (spelled if is_terminal else "".join(fake.words) + "\n")


def test_a_refused_question_is_forgotten(
    fake: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from headrace.core.errors import RequestError

    def refuse() -> None:
        raise RequestError("the prompt has 9999 tokens")

    fake.on_word[0] = refuse
    _stdin(monkeypatch, b"long\nshort\n")
    assert exits.run(["chat"]) == 0
    assert _contents(fake.asked[1]) == [("user", "short")]
    assert "error: the prompt has 9999 tokens" in capsys.readouterr().err


def test_a_conversation_that_is_too_long_is_told_how_to_go_on(
    fake: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from headrace.core.errors import RequestError

    def refuse() -> None:
        raise RequestError("the prompt has 9999 tokens; that is more than max_model_len 4096")

    fake.on_word[0] = refuse
    _stdin(monkeypatch, b"long\n")
    assert exits.run(["chat"]) == 0
    assert "too long to go on: /reset forgets" in capsys.readouterr().err


def test_bytes_that_are_no_text_end_no_conversation(
    fake: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _stdin(monkeypatch, b"a\xff\xc3\n\xc3\xa9\n")
    assert exits.run(["chat"]) == 0
    assert [_contents(asked)[-1] for asked in fake.asked] == [("user", "a\ufffd\ufffd"), ("user", "\u00e9")]


def test_a_base_model_cannot_chat(fake: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    fake.has_chat_template = False
    assert exits.run(["chat", "org/base"]) == 2
    assert "fake has no chat template, so it cannot chat" in capsys.readouterr().err


# ---- for real ---------------------------------------------------------------------------------------------
def test_complete_equals_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tiny random llama with a tokenizer, greedy: the same tokens and the same text."""
    trained = train_byte_level()
    oracle = save_tiny(tmp_path, "llama", vocab_size=trained.get_vocab_size())
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=trained)  # type: ignore[no-untyped-call]
    tokenizer.save_pretrained(tmp_path)
    prompt = tokenizer("the quick brown fox")["input_ids"]
    expected = greedy_tokens(oracle, prompt, 12)
    options = ["--raw", "--temperature", "0", "--max-tokens", "12", "--kv-memory", "16MiB", "--device", "cpu"]
    assert exits.run(["complete", str(tmp_path), "the quick brown fox", "--json", *options]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["token_ids"] == expected[: len(result["token_ids"])]
    assert len(result["token_ids"]) == 12 or result["finish_reason"] == "stop"
    assert result["num_prompt_tokens"] == len(prompt)
    assert result["text"] == tokenizer.decode(result["token_ids"], skip_special_tokens=True)
    # Streamed, the text is the same.
    assert exits.run(["complete", str(tmp_path), "the quick brown fox", *options]) == 0
    shown = capsys.readouterr()
    assert shown.out.removesuffix("\n") == result["text"].removesuffix("\n")
    assert "ready in " in shown.err
