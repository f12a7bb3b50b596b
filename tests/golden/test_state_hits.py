"""Where prompts of models with states hit: a state is kept where a prompt ends, every 512 tokens, and where a prefix
ends that is seen for the second time; none is in the middle of a prompt before. It is the blocks of attention that
tell of a prefix seen before, so a model of states alone has none of the third kind."""

import random
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from recurrent_cases import RECURRENT_CASES
from tiny_checkpoints import save_golden_case

REPRESENTATIVES = ("kimi_linear",)
NAMES = [
    name if name in REPRESENTATIVES else pytest.param(name, marks=pytest.mark.slow)
    for name in (case.name for case in RECURRENT_CASES)
]
RANDOM = random.Random(3)
BASE = [RANDOM.randrange(3, 131) for _ in range(70)]
PROMPTS = {
    "never seen": (BASE, 0),
    "seen: its last full block": (BASE, 68),
    "goes on behind it": ([*BASE, 5, 6, 7], 68),
    "leaves it in the middle, where no state is": ([*BASE[:50], *[9] * 20], 0),
    "leaves it there again: the one before kept a state": ([*BASE[:50], *[11] * 25], 48),
}
STATES_ALONE = ("mamba", "falcon_mamba", "mamba2", "rwkv")
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("name", NAMES)
def test_prompts_start_behind_states_that_others_left(name: str, device: str, tmp_path: Path) -> None:
    save_golden_case(tmp_path, name)
    options: dict[str, Any] = dict(
        device=device, dtype="float32", skip_tokenizer_init=True, block_size=4, max_model_len=128
    )
    with LLM(str(tmp_path), prefix_caching=False, **options) as llm:
        prompts = [ids for ids, _ in PROMPTS.values()]
        expected = [llm.generate({"prompt_token_ids": ids}, PARAMS)[0].outputs[0].token_ids for ids in prompts]
    with LLM(str(tmp_path), max_num_batched_tokens=24, **options) as llm:
        for ids, tokens, (what, (_, hit)) in zip(prompts, expected, PROMPTS.items(), strict=True):
            if what.startswith("leaves it there again") and name in STATES_ALONE:
                hit = 0
            output = llm.generate({"prompt_token_ids": ids}, PARAMS)[0]
            assert (output.num_cached_tokens, output.outputs[0].token_ids) == (hit, tokens), what
