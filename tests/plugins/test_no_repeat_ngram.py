"""The logits processors no_repeat_ngram and forced_eos against those of transformers."""

from typing import Any

import numpy as np
import pluggy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import ForcedEOSTokenLogitsProcessor, NoRepeatNGramLogitsProcessor

from headrace.core import hooks
from headrace.core.errors import RequestError
from headrace.core.sampling.params import SamplingParams
from headrace.plugins.logits_processors import no_repeat_ngram

VOCAB = 6
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=14)


@given(st.integers(1, 4), tokens.filter(bool), tokens)
def test_equals_transformers_step_by_step(size: int, prompt: list[int], outputs: list[int]) -> None:
    theirs = NoRepeatNGramLogitsProcessor(size)
    params = SamplingParams(extra_args={no_repeat_ngram.SIZE: size})
    ours = no_repeat_ngram.NoRepeatNgram(params, prompt)
    for count in range(len(outputs) + 1):
        logits = np.arange(VOCAB, dtype=np.float32)
        ids: Any = torch.tensor([[*prompt, *outputs[:count]]])
        expected: Any = torch.from_numpy(logits[None].copy())
        if ids.shape[1] + 1 >= size:
            expected = theirs(ids, expected)
        np.testing.assert_array_equal(ours(outputs[:count], logits), expected[0].numpy())


@pytest.mark.parametrize("value", [None, 0, -1, "3", True, 2.0])
def test_a_wrong_size_is_refused(value: Any) -> None:
    params = SamplingParams(extra_args={} if value is None else {no_repeat_ngram.SIZE: value})
    with pytest.raises(RequestError, match="no_repeat_ngram needs extra_args 'no_repeat_ngram_size'"):
        no_repeat_ngram.NoRepeatNgram(params, [])


def test_the_hook_gives_it() -> None:
    manager = pluggy.PluginManager("headrace")
    manager.add_hookspecs(hooks)
    manager.register(no_repeat_ngram)
    [offer] = manager.hook.headrace_logits_processors()
    assert offer == {"no_repeat_ngram": no_repeat_ngram.NoRepeatNgram, "forced_eos": no_repeat_ngram.ForcedEnd}


@given(tokens, st.integers(0, VOCAB - 1), st.integers(1, 6))
def test_a_forced_end_equals_transformers(prompt: list[int], token: int, max_tokens: int) -> None:
    theirs = ForcedEOSTokenLogitsProcessor(len(prompt) + max_tokens, token, device="cpu")
    params = SamplingParams(extra_args={no_repeat_ngram.END: token}, max_tokens=max_tokens)
    ours = no_repeat_ngram.ForcedEnd(params, prompt)
    for count in range(max_tokens):
        logits = np.arange(VOCAB, dtype=np.float32)
        ids: Any = torch.zeros(1, len(prompt) + count, dtype=torch.long)
        expected: Any = theirs(ids, torch.from_numpy(logits[None].copy()))
        assert ours([0] * count, logits).argmax() == expected[0].argmax()
        assert np.isfinite(logits).sum() == torch.isfinite(expected[0]).sum()


def test_a_forced_end_without_a_token_is_refused() -> None:
    with pytest.raises(RequestError, match="forced_eos needs extra_args 'forced_eos_token_id'"):
        no_repeat_ngram.ForcedEnd(SamplingParams(), [])
