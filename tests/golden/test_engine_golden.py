"""Greedy tokens of every family through the whole engine, against transformers' generate."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from golden_cases import CASES
from headrace import LLM, SamplingParams
from headrace.core.engine import build
from headrace.core.runner.drafts import Drafter
from tiny_checkpoints import FAMILIES, greedy_tokens, save_golden_case, save_tiny

NUM_TOKENS = 24
PROMPT_LENGTHS = (1, 2, 5, 15, 16, 17, 33, 50)


REPRESENTATIVES = ("gpt_oss", "falcon", "deepseek_v3", "mamba", "falcon_h1")
"""Golden cases that the default run takes through the engine; the full run takes all."""
PARAMS = [
    *sorted(FAMILIES),
    *REPRESENTATIVES,
    *(pytest.param(case.name, marks=pytest.mark.slow) for case in CASES if case.name not in REPRESENTATIVES),
]


@pytest.fixture(scope="module", params=PARAMS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """(folder, the oracle, prompts, expected tokens per prompt)."""
    folder = tmp_path_factory.mktemp(request.param)
    model = (save_tiny if request.param in FAMILIES else save_golden_case)(folder, request.param)
    prompts = make_prompts(model)
    yield folder, model, prompts, [greedy_tokens(model, prompt, NUM_TOKENS) for prompt in prompts]


def make_prompts(model: PreTrainedModel) -> list[list[int]]:
    """Prompts of awkward lengths; some share a prefix."""
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 250) for _ in range(length)] for length in PROMPT_LENGTHS]
    prompts.append(prompts[-1][:40] + [5, 6, 7])
    return prompts


def run(folder: Path, prompts: list[list[int]], **options: Any) -> tuple[list[list[int]], Any]:
    """Token ids that headrace gives for all prompts at once, and the scheduler for a look inside."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    options = {"device": "reference", "dtype": "float32", "skip_tokenizer_init": True, **options}
    with LLM(str(folder), **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        llm.built.engine.scheduler.check_integrity()
        return [output.outputs[0].token_ids for output in outputs], llm


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(max_num_batched_tokens=7),
        dict(block_size=4, max_num_batched_tokens=16),
        pytest.param(dict(max_num_seqs=1), marks=pytest.mark.slow),
        dict(prefix_caching=False, block_size=8),
    ],
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()) or "default",
)
def test_greedy_tokens_equal_transformers(checkpoint: Any, options: dict[str, Any]) -> None:
    folder, _, prompts, expected = checkpoint
    tokens, _ = run(folder, prompts, **options)
    assert tokens == expected


@pytest.mark.parametrize("budget", [2048, 7])
def test_the_cpu_platform_equals_transformers(checkpoint: Any, budget: int) -> None:
    folder, _, prompts, expected = checkpoint
    tokens, _ = run(folder, prompts, device="cpu", max_num_batched_tokens=budget, block_size=4)
    assert tokens == expected


class Prompter(Drafter):
    """Knows how prompts go on, and says every fourth token wrong."""

    def __init__(self, prompts: list[list[int]], expected: list[list[int]]) -> None:
        self.texts = [prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)]

    def propose(self, token_ids: Any, most: int) -> Any:
        length = len(token_ids)
        text = next(text for text in self.texts if text[:length] == token_ids.tolist())
        guesses = np.array(text[length : length + most], np.int32)
        guesses[(np.arange(length, length + len(guesses)) % 4) == 3] ^= 1
        return guesses


@pytest.mark.parametrize("budget", [2048, 7])
@pytest.mark.parametrize("device", ["cpu", pytest.param("reference", marks=pytest.mark.slow)])
def test_drafts_change_nothing(checkpoint: Any, monkeypatch: pytest.MonkeyPatch, device: str, budget: int) -> None:
    folder, _, prompts, expected = checkpoint
    monkeypatch.setattr(build, "find_drafter", lambda *_: Prompter(prompts, expected))
    options: dict[str, Any] = dict(max_num_batched_tokens=budget, block_size=4, speculative="ngram:5")
    tokens, llm = run(folder, prompts, device=device, **options)
    assert tokens == expected
    scheduler = llm.built.engine.scheduler
    assert 0 < scheduler.num_accepted_tokens < scheduler.num_draft_tokens


def test_preemption_changes_nothing(checkpoint: Any) -> None:
    folder, _, prompts, expected = checkpoint
    options: dict[str, Any] = dict(block_size=4, max_model_len=80, max_num_batched_tokens=32)
    _, alone = run(folder, prompts[:1], max_num_seqs=1, **options)
    room = int(alone.built.capacity.kv.total_bytes * 1.5)
    tokens, llm = run(folder, prompts, kv_memory=str(room), **options)
    assert tokens == expected
    assert llm.built.engine.scheduler.num_preemptions > 0


def test_prefix_hit_equals_miss(checkpoint: Any) -> None:
    folder, _, prompts, expected = checkpoint
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(folder), device="reference", dtype="float32", skip_tokenizer_init=True, block_size=4) as llm:
        outputs = []
        for _ in range(2):
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
            assert [output.outputs[0].token_ids for output in outputs] == expected
        assert all(o.num_cached_tokens > 0 for o in outputs if len(o.prompt_token_ids) > 4)


def test_prompt_logprobs_equal_transformers(checkpoint: Any) -> None:
    folder, model, prompts, _ = checkpoint
    prompt = prompts[-1]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0].double()
    expected = logits.log_softmax(-1)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=3, logprobs=2, ignore_eos=True)
    with LLM(
        str(folder), device="reference", dtype="float32", skip_tokenizer_init=True, max_num_batched_tokens=16
    ) as llm:
        output = llm.generate({"prompt_token_ids": prompt}, params)[0]
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for position, entry in enumerate(output.prompt_logprobs[1:], 1):
        assert entry is not None and len(entry) in (3, 4)
        for token, value in entry.items():
            assert value.logprob == pytest.approx(expected[position - 1, token].item(), abs=2e-3)
            theirs = expected[position - 1]
            surely, perhaps = (int((theirs > theirs[token] + by).sum()) for by in (1e-4, -1e-4))  # with itself
            assert value.rank is not None and surely < value.rank <= perhaps
        assert prompt[position] in entry
    sampled = output.outputs[0].logprobs
    assert sampled is not None and len(sampled) == 1
    top = expected[-1].topk(2)
    assert {
        t: pytest.approx(v, abs=2e-3) for t, v in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    } == {t: v.logprob for t, v in sampled[0].items()}
