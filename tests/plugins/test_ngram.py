"""Drafts by n-gram: what they guess, and that a model that repeats itself takes them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import LLM, SamplingParams
from headrace.core.errors import ConfigError, PluginError
from headrace.plugins.drafters.ngram import LONGEST, SHORTEST, NgramDrafter
from tiny_checkpoints import save_tiny


def guessed(text: list[int], most: int) -> list[int]:
    return [int(token) for token in NgramDrafter().propose(np.array(text, np.int32), most)]


def by_definition(text: list[int], most: int) -> list[int]:
    """The longest n-gram at the end that stood before, the latest of them, found by trying all."""
    for length in range(LONGEST, SHORTEST - 1, -1):
        for first in range(len(text) - length - 1, -1, -1):
            if text[first : first + length] == text[len(text) - length :] and length < len(text):
                found = list(text)
                for n in range(most):
                    found.append(found[first + length + n])
                return found[len(text) :]
    return []


@given(text=st.lists(st.integers(0, 3), min_size=1, max_size=40), most=st.integers(1, 9))
def test_guesses_are_those_of_the_definition(text: list[int], most: int) -> None:
    assert guessed(text, most) == by_definition(text, most)


def test_guesses() -> None:
    assert guessed([1, 2, 3, 4, 9, 1, 2, 3], 3) == [4, 9, 1]
    assert guessed([1, 2, 3, 7, 2, 3, 8, 1, 2, 3], 2) == [7, 2]  # three tokens, not the two that came later
    assert guessed([5, 6, 5, 6, 5], 4) == [6, 5, 6, 5]  # in circles
    assert guessed([1, 2, 3], 4) == [] and guessed([7], 4) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose attention gives nothing: the next token depends on the last one alone, so greedy text soon goes
    in circles."""
    folder = tmp_path_factory.mktemp("llama")
    model: Any = save_tiny(folder, "llama")
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    model.save_pretrained(folder)
    return folder


def answers(folder: Path, params: list[SamplingParams], **options: Any) -> tuple[list[Any], Any]:
    """Tokens and log probabilities of some prompts, to the last bit, and the engine's scheduler."""
    prompts: list[Any] = [{"prompt_token_ids": [5, 6, 7, 8] * 4 + [9 + i]} for i in range(len(params))]
    options = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, **options}
    with LLM(str(folder), **options) as llm:
        outputs = llm.generate(prompts, params)
        llm.built.engine.scheduler.check_integrity()
        found = [
            (
                out.outputs[0].token_ids,
                [{t: p.logprob for t, p in step.items()} for step in out.outputs[0].logprobs or ()],
                out.outputs[0].finish_reason,
            )
            for out in outputs
        ]
        return found, llm.built.engine.scheduler


def test_drafts_change_no_bit(folder: Path) -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0.7, seed=3, max_tokens=60, ignore_eos=True, logprobs=0),
        SamplingParams(temperature=0.0, max_tokens=60, repetition_penalty=1.2),
        SamplingParams(temperature=0.0, max_tokens=60, min_tokens=8, stop_token_ids=list(range(100, 140))),
        SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True),
    ]
    without, plain = answers(folder, params)
    assert plain.num_draft_tokens == 0
    for options in ({}, {"max_num_seqs": 1}, {"max_num_batched_tokens": 5}, {"device": "reference"}):
        found, scheduler = answers(folder, params, speculative="ngram:3", **options)
        if not options.get("device"):
            assert found == without
            assert 0 < scheduler.num_accepted_tokens <= scheduler.num_draft_tokens
        assert [tokens for tokens, _, _ in found] == [tokens for tokens, _, _ in without]


def test_text_that_goes_in_circles_takes_fewer_steps(folder: Path) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)]
    steps = []
    for speculative in ("none", "ngram:4"):
        _, scheduler = answers(folder, params, speculative=speculative)
        steps.append(scheduler._step)
    assert steps[1] < 0.6 * steps[0]


@pytest.mark.parametrize("text", ["ngram:0", "ngram:x", "ngram:33", "", ":4"])
def test_a_setting_that_means_nothing(folder: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="speculative must be none, or a drafter"):
        LLM(str(folder), speculative=text)


def test_a_drafter_that_nobody_brings(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no plugin brings a drafter 'ngran'.*ngram") as caught:
        LLM(str(folder), device="cpu", skip_tokenizer_init=True, speculative="ngran:2")
    assert "--speculative ngram" in str(caught.value)


def test_a_drafter_that_cannot_be_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> None:
        raise OSError("no draft model")

    monkeypatch.setattr(NgramDrafter, "__init__", fail)
    with pytest.raises(PluginError, match="the drafter 'ngram' cannot be made.*no draft model"):
        LLM(str(folder), device="cpu", skip_tokenizer_init=True, speculative="ngram")
