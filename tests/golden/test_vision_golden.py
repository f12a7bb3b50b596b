"""Vision-language models through the whole engine, against transformers: prompts with images, and what is shared."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.core.errors import RequestError
from vision_cases import NUM_TOKENS, VISION_CASES, VisionOracle, VisionPrompt, picture

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
REPRESENTATIVES = ("llava", "qwen2_5_vl")
"""Cases of the default run; the full run takes all."""


@pytest.fixture(
    scope="module",
    params=[
        case if str(case) in REPRESENTATIVES else pytest.param(case, marks=pytest.mark.slow) for case in VISION_CASES
    ],
    ids=str,
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """(folder, the oracle, prompts, expected tokens per prompt)."""
    folder = tmp_path_factory.mktemp("model")
    oracle = VisionOracle(request.param, folder)
    first, second = picture(1), picture(2, 60, 60)
    prompts = [
        oracle.prompt(5, first, 7),
        oracle.prompt(5, second, 7),  # equal text, another image
        oracle.prompt(3, first, 4, second, 6, first, 2),
        oracle.prompt(9),
        oracle.prompt(20, picture(3, 28, 28), 15),
    ]
    yield folder, oracle, prompts, [oracle.answer(prompt) for prompt in prompts]


def given(prompts: list[VisionPrompt]) -> list[Any]:
    """As `LLM.generate` takes them."""
    return [{"prompt_token_ids": p.token_ids, "multi_modal_data": {"image": p.pictures}} for p in prompts]


def open_llm(checkpoint: Any, **options: Any) -> LLM:
    folder, oracle, *_ = checkpoint
    if "max_num_batched_tokens" in options:
        options["max_num_batched_tokens"] = max(options["max_num_batched_tokens"], oracle.case.least_budget)
    options = {"device": "reference", "dtype": "float32", "skip_tokenizer_init": True, **options}
    return LLM(str(folder), **options)


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(max_num_batched_tokens=7, block_size=4),
        pytest.param(dict(max_num_seqs=1), marks=pytest.mark.slow),
        pytest.param(dict(prefix_caching=False, block_size=8), marks=pytest.mark.slow),
        dict(device="cpu", block_size=4),
    ],
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()) or "default",
)
def test_greedy_tokens_equal_transformers(checkpoint: Any, options: dict[str, Any]) -> None:
    *_, prompts, expected = checkpoint
    with open_llm(checkpoint, **options) as llm:
        outputs = llm.generate(given(prompts), GREEDY)
        llm.built.engine.scheduler.check_integrity()
    assert [output.outputs[0].token_ids for output in outputs] == expected


@pytest.mark.parametrize("budget", [2048, 7])
def test_log_probabilities_of_prompts_equal_transformers(checkpoint: Any, budget: int) -> None:
    _, oracle, prompts, _ = checkpoint
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    with open_llm(checkpoint, max_num_batched_tokens=budget) as llm:
        outputs = llm.generate(given(prompts), params)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_logprobs is not None
        pairs = zip(output.prompt_logprobs, prompt.token_ids, strict=True)
        got = [entry[token].logprob for entry, token in pairs if entry is not None]
        want = oracle.logprobs(prompt)
        assert (torch.tensor(got) - want).abs().max() < 5e-4 * want.std() + 1e-4


def test_equal_images_are_found_and_different_ones_never(checkpoint: Any) -> None:
    """Twice the same prompts: the second time their prefixes are there, as far as an image has not changed them."""
    _, oracle, prompts, expected = checkpoint
    with open_llm(checkpoint, block_size=4) as llm:
        for prompt, want in zip(prompts, expected, strict=True):
            for again in range(2):
                output = llm.generate(given([prompt]), GREEDY)[0]
                assert output.outputs[0].token_ids == want
                has_prefix = oracle.case.least_budget < 256  # one that sees all is none
                if again and has_prefix and len(prompt.token_ids) > 8:
                    assert output.num_cached_tokens >= (len(prompt.token_ids) - 1) // 4 * 4
        first, other = prompts[0], prompts[1]
        assert first.token_ids[:6] == other.token_ids[:6] and first.pictures[0] is not other.pictures[0]


def test_an_image_that_was_seen_is_not_encoded_again(checkpoint: Any) -> None:
    _, oracle, prompts, expected = checkpoint
    with open_llm(checkpoint, prefix_caching=oracle.case.is_crossed) as llm:
        encoded: list[int] = []
        schedule = llm.built.engine.scheduler.schedule

        def counting() -> Any:
            plan = schedule()
            if plan is not None:
                encoded.append(sum(kept.must_encode for new in plan.new for kept in new.images))
                encoded.append(sum(new.encoder is not None for new in plan.new))
            return plan

        llm.built.engine.scheduler.schedule = counting  # type: ignore[method-assign]
        seen = []
        for _ in range(2):
            outputs = llm.generate(given(prompts[:3]), GREEDY)
            assert [output.outputs[0].token_ids for output in outputs] == expected[:3]
            seen.append(sum(encoded))
    assert seen[0] == seen[1] > 0


def test_preemption_changes_nothing(checkpoint: Any) -> None:
    *_, prompts, expected = checkpoint
    length = max(len(prompt.token_ids) for prompt in prompts) + NUM_TOKENS
    options: dict[str, Any] = dict(block_size=2, max_model_len=length, prefix_caching=False)
    with open_llm(checkpoint, max_num_seqs=1, **options) as alone:
        least = alone.built.capacity.kv.total_bytes
    num_preemptions = 0
    for factor in (1.6, 1.3, 1.1):  # how much room is too little depends on the lengths of prompts
        room = str(int(least * factor))
        with open_llm(checkpoint, kv_memory=room, image_cache_tokens=2 * length, **options) as llm:
            outputs = llm.generate(given(prompts * 2), GREEDY)
            scheduler = llm.built.engine.scheduler
            scheduler.check_integrity()
        assert [output.outputs[0].token_ids for output in outputs] == expected * 2
        num_preemptions += scheduler.num_preemptions
        if num_preemptions:
            break
    assert num_preemptions > 0


def test_images_beyond_what_can_be_kept_are_refused(checkpoint: Any) -> None:
    _, oracle, prompts, expected = checkpoint
    many = [oracle.prompt(1, *[picture(1)] * 12)] if oracle.case.is_crossed else prompts[2:3]
    with open_llm(checkpoint, block_size=4, image_cache_tokens=4) as llm:
        with pytest.raises(RequestError, match="can be kept"):
            llm.generate(given(many), GREEDY)
        assert llm.generate(given(prompts[3:4]), GREEDY)[0].outputs[0].token_ids == expected[3]


def test_places_and_images_must_agree(checkpoint: Any) -> None:
    *_, prompts, _ = checkpoint
    with open_llm(checkpoint) as llm:
        with pytest.raises(RequestError, match="images were given|needs the token|without a|needs a tokenizer"):
            llm.generate({"prompt_token_ids": [1, 2, 3], "multi_modal_data": {"image": prompts[0].pictures}}, GREEDY)
