"""Whisper's rules for what may follow what, as a logits processor that requests name (Radford et al. 2022, 4.5)."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..errors import RequestError
from ..sampling.params import SamplingParams

NAME = "whisper"
"""Of the processor, and of its arguments in extra_args."""

Logits = npt.NDArray[np.float32]


class WhisperRules:
    """Text begins with a timestamp; timestamps come in pairs, do not fall, and win over text if they are more likely
    together than any one token of it. Arguments: timestamp_begin (-1: no timestamps), end, begin_suppress,
    max_initial_timestamp (None: any)."""

    def __init__(self, sampling_params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        rules = sampling_params.extra_args.get(NAME)
        try:
            assert isinstance(rules, dict)
            self._begin, self._end = int(rules["timestamp_begin"]), int(rules["end"])
            self._begin_suppress = [int(token) for token in rules["begin_suppress"]]
            most = rules.get("max_initial_timestamp")
            self._most = None if most is None else int(most)
        except (AssertionError, KeyError, TypeError, ValueError):
            raise RequestError(
                f"the logits processor {NAME} needs extra_args {NAME!r} with timestamp_begin, end and begin_suppress"
            ) from None

    def __call__(self, output_token_ids: Sequence[int], logits: Logits) -> Logits:
        """Logits [vocab_size] with -inf for what the rules forbid."""
        if not output_token_ids:
            logits[self._begin_suppress] = -np.inf
        if self._begin < 0:
            return logits
        begin, tokens = self._begin, output_token_ids
        if not tokens:
            logits[:begin] = -np.inf
            if self._most is not None:
                logits[begin + self._most + 1 :] = -np.inf
            return logits
        is_last, is_pair = tokens[-1] >= begin, len(tokens) < 2 or tokens[-2] >= begin
        if is_last and is_pair:
            logits[begin:] = -np.inf
        elif is_last:
            logits[: self._end] = -np.inf
        times = [token for token in tokens if token >= begin]
        if times:
            logits[begin : times[-1] + (0 if is_last and not is_pair else 1)] = -np.inf
        text, time = logits[:begin], logits[begin:]
        top = time.max(initial=-np.inf)
        if top > -np.inf and top + np.log(np.exp(time - top).sum()) > text.max():
            text[:] = -np.inf
        return logits
