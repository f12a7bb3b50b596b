"""Llama 3.2 Vision: the token of images lies behind the vocabulary, and what its encoders hold is planned."""

from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.core.config import EngineConfig
from headrace.core.devices import open_device
from headrace.core.errors import RequestError
from headrace.core.memory_plan import device_target, plan_model
from headrace.core.plugin_loader import load_plugins
from vision_cases import IMAGE_TOKEN, VISION_CASES, VisionCase, VisionOracle, picture

[MLLAMA] = (case for case in VISION_CASES if str(case) == "mllama")
CASE = VisionCase(**{**vars(MLLAMA), "text": {**MLLAMA.text, "vocab_size": IMAGE_TOKEN}})
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def test_the_token_of_images_may_lie_behind_the_vocabulary(tmp_path: Path) -> None:
    oracle = VisionOracle(CASE, tmp_path)
    prompts = [oracle.prompt(picture(1), picture(2, 60, 60), 9), oracle.prompt(7), oracle.prompt(4, picture(3), 5)]
    given: list[Any] = [
        {"prompt_token_ids": prompt.token_ids, "multi_modal_data": {"image": prompt.pictures}} for prompt in prompts
    ]
    options: dict[str, Any] = dict(dtype="float32", skip_tokenizer_init=True, kv_memory="16MiB")
    with LLM(str(tmp_path), device="reference", **options) as llm:
        outputs = llm.generate(given, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == [oracle.answer(prompt) for prompt in prompts]
        penalty = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, repetition_penalty=1.5)
        assert len(llm.generate(given[2:], penalty)[0].outputs[0].token_ids) == 6
        with pytest.raises(RequestError, match="has no probability"):
            llm.generate(given[2:], SamplingParams(max_tokens=1, prompt_logprobs=0))


def test_what_the_encoder_holds_is_planned(tmp_path: Path) -> None:
    VisionOracle(CASE, tmp_path)
    device = open_device(EngineConfig.from_options({"device": "cpu"}), load_plugins())
    planned = []
    for images in (True, False):
        options: dict[str, Any] = dict(model=str(tmp_path), dtype="float32", max_num_batched_tokens=16, images=images)
        plan = plan_model(EngineConfig.from_options(options), device_target(device), lambda line: None)
        planned.append(plan.step_bytes)
    device.close()
    # Eight images of four tiles of 17 patches: pixels, four streams of 32, and 40 hidden values, wider too.
    assert planned[0] - planned[1] >= 8 * 4 * 17 * (7 * 7 * 3 * 4 + 4 * 32 * 4 + 40 * 12)
