"""The no_repeat_ngram plugin against transformers' NoRepeatNGramLogitsProcessor."""

from typing import Any

import numpy as np
import pluggy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import NoRepeatNGramLogitsProcessor

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
    assert manager.hook.headrace_logits_processors() == [{"no_repeat_ngram": no_repeat_ngram.NoRepeatNgram}]
