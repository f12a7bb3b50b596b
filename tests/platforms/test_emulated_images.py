"""Models that read images on emulated accelerators: the reference's tokens where decodes are recorded, an error where
every step is."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.core.errors import RequestError
from vision_cases import VISION_CASES, VisionCase, VisionOracle, picture

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
FAMILIES = {"llava": "rows in prompts", "qwen2_vl": "ropes of three axes", "mllama": "cross attention"}
CASES = [next(case for case in VISION_CASES if case.model_type == name) for name in FAMILIES]


def answers(folder: Path, device: str, prompts: list[Any], budget: int) -> list[list[int]]:
    options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "kv_memory": "8MiB"}
    options |= {"max_model_len": 128, "max_num_batched_tokens": max(64, budget)}
    with LLM(str(folder), device=device, **options) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decodes_behind_images_are_recorded(case: VisionCase, tmp_path: Path) -> None:
    oracle = VisionOracle(case, tmp_path)
    prompt = oracle.prompt(5, picture(1), 7)
    with_image: Any = {"prompt_token_ids": prompt.token_ids, "multi_modal_data": {"image": prompt.pictures}}
    text: Any = {"prompt_token_ids": [5, 6, 7]}
    want = answers(tmp_path, "reference", [with_image, text], case.least_budget)
    if find_spec("triton") is not None:
        assert answers(tmp_path, "cuda:emulated", [with_image, text], case.least_budget) == want
    assert answers(tmp_path, "gaudi:emulated", [text], case.least_budget) == want[1:]
    with pytest.raises(RequestError, match="reads no images"):
        answers(tmp_path, "gaudi:emulated", [with_image], case.least_budget)
