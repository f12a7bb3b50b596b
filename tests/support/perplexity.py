"""Perplexity of a loaded model over a text of the tests' own."""

import math
from collections.abc import Sequence
from pathlib import Path

from headrace import LLM, SamplingParams

PROSE = Path(__file__).parents[1] / "data" / "prose.txt"


def perplexity(llm: LLM, token_ids: Sequence[int]) -> float:
    """exp of the mean negative log probability of all tokens but the first, in one context."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    [output] = llm.generate([{"prompt_token_ids": list(token_ids)}], params)
    assert output.prompt_logprobs is not None
    steps = [step for step in output.prompt_logprobs if step is not None]
    assert len(steps) == len(token_ids) - 1
    chosen = [step[token].logprob for step, token in zip(steps, token_ids[1:], strict=True)]
    return math.exp(-sum(chosen) / len(chosen))
