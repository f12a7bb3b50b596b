"""Models that read images on emulated accelerators, where steps are recorded or compiled: the reference's tokens."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from vision_cases import VISION_CASES, VisionCase, VisionOracle, picture

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
QUICK = {
    ("gaudi:emulated", "llava"): "rows in prompts",
    ("gaudi:emulated", "qwen2_vl"): "ropes of three axes",
    ("gaudi:emulated", "mllama"): "cross attention",
    ("gaudi:emulated", "gemma3"): "tokens that see the rest of their image",
    ("tpu:emulated", "llava"): "",
    ("tpu:emulated", "mllama"): "",
    ("cuda:emulated", "llava"): "",
    ("cuda:emulated", "mllama"): "",
}
"""The first case of a type that the default run takes; the full run takes all."""
LIBRARIES = {"cuda": "triton", "tpu": "jax", "neuron": "jax", "gaudi": "torch"}


def on_devices() -> list[Any]:
    """Each case on each device."""
    found, seen = [], set()
    for name, library in LIBRARIES.items():
        device = f"{name}:emulated"
        for case in VISION_CASES:
            is_quick = (device, case.model_type) in QUICK and (device, case.model_type) not in seen
            seen.add((device, case.model_type))
            marks = [] if is_quick else [pytest.mark.slow]
            marks += [] if find_spec(library) else [pytest.mark.skip(reason=f"{library} is not installed")]
            found.append(pytest.param(device, case, marks=marks, id=f"{name}-{case}"))
    return found


def answers(folder: Path, device: str, prompts: list[Any], budget: int) -> list[list[int]]:
    options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "kv_memory": "8MiB"}
    options |= {"max_model_len": 128, "max_num_batched_tokens": max(64, budget), "max_num_seqs": 4}
    with LLM(str(folder), device=device, **options) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY)]


def test_the_sample_is_of_the_table() -> None:
    assert {name for _, name in QUICK} <= {case.model_type for case in VISION_CASES}


@pytest.mark.parametrize(("device", "case"), on_devices())
def test_tokens_behind_images_are_those_of_the_reference(device: str, case: VisionCase, tmp_path: Path) -> None:
    oracle = VisionOracle(case, tmp_path)
    prompts: list[Any] = [
        {"prompt_token_ids": prompt.token_ids, "multi_modal_data": {"image": prompt.pictures}}
        for prompt in (oracle.prompt(5, picture(1), 7), oracle.prompt(picture(2, 30, 44), 9, 8, 11))
    ]
    prompts.append({"prompt_token_ids": [5, 6, 7]})
    want = answers(tmp_path, "reference", prompts, case.least_budget)
    assert answers(tmp_path, device, prompts, case.least_budget) == want
