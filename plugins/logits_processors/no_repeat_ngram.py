"""Logits processors as transformers' generate has them: no_repeat_ngram, no sequence of n tokens may appear twice;
forced_eos, a text that reaches its length ends with one token."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from headrace.core.errors import RequestError
from headrace.core.hooks import hookimpl
from headrace.core.sampling.params import SamplingParams

NAME = "no_repeat_ngram"
SIZE = "no_repeat_ngram_size"
END = "forced_eos_token_id"

Logits = npt.NDArray[np.float32]


@hookimpl
def headrace_logits_processors() -> Mapping[str, "type[NoRepeatNgram] | type[ForcedEnd]"]:
    """Their arguments are extra_args={"no_repeat_ngram_size": n} and {"forced_eos_token_id": id}."""
    return {NAME: NoRepeatNgram, "forced_eos": ForcedEnd}


class NoRepeatNgram:
    """Bans each token that would complete an n-gram which prompt or output already has.

    Keeps, for every n - 1 tokens that were seen, the tokens that followed; a step looks at new tokens only.
    """

    def __init__(self, sampling_params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        size = sampling_params.extra_args.get(SIZE)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise RequestError(
                f"{NAME} needs extra_args {SIZE!r}, a number of tokens from 1 on, got {size!r}",
                remedies=(f'extra_args={{"{SIZE}": 3}}',),
            )
        self._prefix_len = size - 1
        self._followers: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        self._tokens: list[int] = []
        self._num_outputs = 0
        self._take(prompt_token_ids)

    def __call__(self, output_token_ids: Sequence[int], logits: Logits) -> Logits:
        """Logits [vocab_size] with -inf for banned tokens."""
        self._take(output_token_ids[self._num_outputs :])
        self._num_outputs = len(output_token_ids)
        if len(self._tokens) < self._prefix_len:
            return logits
        prefix = tuple(self._tokens[len(self._tokens) - self._prefix_len :])
        logits[self._followers.get(prefix, [])] = -np.inf
        return logits

    def _take(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if len(self._tokens) >= self._prefix_len:
                prefix = tuple(self._tokens[len(self._tokens) - self._prefix_len :])
                self._followers[prefix].append(token)
            self._tokens.append(token)


class ForcedEnd:
    """Leaves one token to the last place of a text whose length its request bounds."""

    def __init__(self, sampling_params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        token = sampling_params.extra_args.get(END)
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise RequestError(
                f"forced_eos needs extra_args {END!r}, a token id, got {token!r}",
                remedies=(f'extra_args={{"{END}": 2}}',),
            )
        self._token, self._max_tokens = token, sampling_params.max_tokens

    def __call__(self, output_token_ids: Sequence[int], logits: Logits) -> Logits:
        """Logits [vocab_size], all but one of them -inf in the last place."""
        if self._max_tokens is not None and len(output_token_ids) + 1 >= self._max_tokens:
            others = np.arange(len(logits)) != self._token
            logits[others] = -np.inf
        return logits
