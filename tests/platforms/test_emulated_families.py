"""Every family on the emulated devices that have static shapes: tokens and hidden states of transformers."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import encoder_cases
from golden_cases import CASES
from headrace import LLM, SamplingParams
from tiny_checkpoints import FAMILIES, greedy_tokens, save_golden_case, save_tiny

NUM_TOKENS = 12
OPTIONS: dict[str, Any] = dict(
    dtype="float32",
    skip_tokenizer_init=True,
    threads=1,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_model_len=96,
    kv_memory="8MiB",
)
DEVICES = ("gaudi:emulated", "neuron:emulated", "tpu:emulated")
NEEDS_JAX = pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed: pip install 'headrace[tpu]'")
QUICK = {
    ("neuron:emulated", "gemma2"),
    ("neuron:emulated", "bert"),
    ("neuron:emulated", "falcon_h1"),
    ("neuron:emulated", "qwen3_next"),
    ("neuron:emulated", "llama4_text"),
    *(("gaudi:emulated", name) for name in ("gemma2", "deepseek_v3", "mpnet", "mamba2")),
}
"""What the default run takes; the full run takes all."""


DECODERS = [*sorted(FAMILIES), *(case.name for case in CASES)]


def on_devices(names: list[str]) -> list[Any]:
    """Each case on each device."""
    return [
        pytest.param(
            device,
            name,
            marks=[
                *([] if (device, name) in QUICK else [pytest.mark.slow]),
                *([NEEDS_JAX] if needs_jax(device) else []),
            ],
        )
        for device in DEVICES
        for name in names
    ]


def needs_jax(device: str) -> bool:
    return device.partition(":")[0] in ("neuron", "tpu")


@pytest.mark.parametrize(("device", "name"), on_devices(DECODERS))
def test_greedy_tokens_are_those_of_transformers(device: str, name: str, tmp_path: Path) -> None:
    model = (save_tiny if name in FAMILIES else save_golden_case)(tmp_path, name)
    rng = np.random.default_rng(7)
    prompts = [rng.integers(3, 250, length).tolist() for length in (1, 5, 16, 17, 40)]
    prompts.append(prompts[-1][:33] + [5])
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(tmp_path), device=device, **OPTIONS) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    got = [output.outputs[0].token_ids for output in outputs]
    assert got == [greedy_tokens(model, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize(("device", "name"), on_devices([case.name for case in encoder_cases.CASES]))
def test_embeddings_are_means_of_transformers_hidden_states(device: str, name: str, tmp_path: Path) -> None:
    case = next(case for case in encoder_cases.CASES if case.name == name)
    encoder_cases.make_checkpoint(case, tmp_path, "AutoModel")
    theirs = encoder_cases.load_theirs(tmp_path, "AutoModel", "eager")
    rng = np.random.default_rng(7)
    texts = [rng.integers(3, 131, length).tolist() for length in (23, 1, 40, 9, 60)]
    with LLM(str(tmp_path), device=device, pooling="mean", **{**OPTIONS, "max_model_len": 60}) as llm:
        outputs = llm.embed([{"prompt_token_ids": ids} for ids in texts])
    for ids, output in zip(texts, outputs, strict=True):
        inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
        mean = theirs(**inputs).last_hidden_state[0].mean(0)
        vector = np.asarray(output.embedding)
        expected = (mean / mean.norm()).numpy()
        np.testing.assert_allclose(vector / np.linalg.norm(vector), expected, atol=2e-5)
