"""The embedded default model: greedy tokens equal to those of transformers on the same GGUF and token ids."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from headrace import LLM, SamplingParams
from smollm2 import read_state, smollm2_config
from tiny_checkpoints import greedy_tokens

PROMPTS = (
    "Why is the sky blue?",
    "Write a haiku about the sea.",
    "What is 17 + 25?",
    "Name three rivers in Europe.",
    "Explain photosynthesis to a child.",
    "Translate 'good morning' into French.",
    "List the planets of the solar system in order.",
    "Who wrote Hamlet?",
    "Give me a recipe for pancakes.",
    "What does HTTP stand for?",
    "Describe the colour red without naming an object.",
    "Write a Python function that reverses a string.",
    "What happened in 1969?",
    "Summarise the plot of Romeo and Juliet in one sentence.",
    "How do I boil an egg?",
    "What is the capital of Japan, and how many people live there?",
    "Tell me a joke about computers.",
    "Correct this sentence: he go to school yesterday.",
    "What are the primary colours?",
    "Finish the story: The door opened slowly and",
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """SmolLM2 in float32, as `headrace complete --dtype float32` loads it."""
    with LLM(device="cpu", dtype="float32", max_model_len=512, kv_memory="1GiB") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def oracle(llm: LLM) -> Any:
    """transformers' model with the weights as the gguf package dequantizes them: quick."""
    state = read_state(Path(llm.built.model.path))
    model: Any = LlamaForCausalLM(smollm2_config())
    model.eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    model.tie_weights()
    return model


def check(llm: LLM, oracle: Any, questions: tuple[str, ...], count: int) -> None:
    """Ask all at once in one batch; each answer must equal transformers' alone."""
    prompts = [
        llm.tokenizer.encode(llm.render_chat([{"role": "user", "content": question}]), add_special_tokens=False)
        for question in questions
    ]
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    for question, prompt, output in zip(questions, prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == greedy_tokens(oracle, prompt, count), question


@pytest.mark.weights
def test_answers_equal_transformers(llm: LLM, oracle: Any) -> None:
    check(llm, oracle, PROMPTS[:2], 16)


@pytest.mark.weights
@pytest.mark.slow
def test_twenty_answers_of_64_tokens_equal_transformers(llm: LLM) -> None:
    """Against transformers' own reading of the file, which takes minutes."""
    path = Path(llm.built.model.path)
    model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    check(llm, model.eval(), PROMPTS, 64)


@pytest.mark.weights
def test_chat_answers_in_english(llm: LLM) -> None:
    output = llm.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0))
    assert "Paris" in output[0].outputs[0].text
    assert output[0].outputs[0].finish_reason == "stop"
