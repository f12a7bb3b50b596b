"""Greedy tokens of encoder-decoder models through the whole engine, against transformers' generate."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.core.errors import RequestError
from headrace.core.stages import EncoderInput
from paged_seq2seq import NUM_FRAMES, SEQ2SEQ_CASES, load_oracle, make_seq2seq

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS = 16
LENGTHS = (3, 40, 17, 16, 1, 25)
REPRESENTATIVES = ("t5", "whisper")
"""Cases that the default run takes through the engine; the full run takes all."""
JAX = pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed: pip install 'headrace[tpu]'")
TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: pip install triton")
PARAMS = [
    case.name if case.name in REPRESENTATIVES else pytest.param(case.name, marks=pytest.mark.slow)
    for case in SEQ2SEQ_CASES
]


@pytest.fixture(scope="module", params=PARAMS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(folder, the encoder's inputs, decoder prompts, expected tokens)."""
    case = next(case for case in SEQ2SEQ_CASES if case.name == request.param)
    folder = make_seq2seq(case, tmp_path_factory.mktemp(case.name))
    oracle, random = load_oracle(folder), np.random.default_rng(5)
    is_speech = case.model_type == "whisper"
    inputs = [
        EncoderInput(features=random.standard_normal((NUM_FRAMES, 12)).astype(np.float32))
        if is_speech
        else EncoderInput(token_ids=random.integers(3, 97, length).tolist())
        for length in LENGTHS
    ]
    targets = [[2, *random.integers(3, 97, length // 2).tolist()] for length in LENGTHS]
    expected = [generate(oracle, source, target) for source, target in zip(inputs, targets, strict=True)]
    return folder, inputs, targets, expected


def generate(oracle: Any, source: EncoderInput, target: list[int]) -> list[int]:
    """transformers' greedy tokens behind `target`."""
    torch.set_num_threads(1)
    if source.features is None:
        ids = torch.tensor([list(source.token_ids)])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    else:
        inputs = {"input_features": torch.from_numpy(source.features.T.copy())[None]}
    with torch.inference_mode():
        states = oracle.get_encoder()(**inputs)
        tokens = list(target)
        for _ in range(NUM_TOKENS):
            # FSMT makes its causal mask only where it is given the ids, too, and keeps no cache.
            decoded = {"decoder_input_ids": torch.tensor([tokens]), "use_cache": False}
            logits = oracle(**inputs, encoder_outputs=states, **decoded).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(target) :]


def run(folder: Path, inputs: list[EncoderInput], targets: list[list[int]], **options: Any) -> tuple[Any, LLM]:
    """Token ids that headrace gives for all requests at once."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    options = {"device": "reference", "dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 8, **options}
    with LLM(str(folder), **options) as llm:
        engine = llm.built.engine
        for i, (source, target) in enumerate(zip(inputs, targets, strict=True)):
            engine.add(str(i), target, params, encoder=source, final_only=True)
        found: dict[str, list[int]] = {}
        while engine.has_unfinished():
            found.update((output.request_id, output.outputs[0].token_ids) for output in engine.step())
            engine.scheduler.check_integrity()
        return [found[str(i)] for i in range(len(inputs))], llm


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(max_num_batched_tokens=7, block_size=4),
        pytest.param(dict(max_num_seqs=2), marks=pytest.mark.slow),
        pytest.param(dict(prefix_caching=False, block_size=8), marks=pytest.mark.slow),
        dict(device="cpu", block_size=4),
        pytest.param(dict(device="sim"), marks=pytest.mark.slow),
        dict(device="gaudi:emulated", max_num_seqs=4),
        pytest.param(dict(device="tpu:emulated", max_num_seqs=4), marks=JAX),
        pytest.param(dict(device="neuron:emulated", max_num_batched_tokens=8), marks=[pytest.mark.slow, JAX]),
        pytest.param(dict(device="cuda:emulated", max_num_seqs=3), marks=[pytest.mark.slow, TRITON]),
    ],
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()) or "default",
)
def test_greedy_tokens_equal_transformers(checkpoint: Any, options: dict[str, Any]) -> None:
    folder, inputs, targets, expected = checkpoint
    tokens, _ = run(folder, inputs, targets, **options)
    assert tokens == expected


def test_preemption_changes_nothing(checkpoint: Any) -> None:
    folder, inputs, targets, expected = checkpoint
    options: dict[str, Any] = dict(block_size=4, max_model_len=40, max_num_batched_tokens=32)
    _, alone = run(folder, inputs[:1], targets[:1], max_num_seqs=1, **options)
    room = int(alone.built.capacity.kv.total_bytes * 1.3)
    tokens, llm = run(folder, inputs, targets, kv_memory=str(room), **options)
    assert tokens == expected
    if len(inputs[0].token_ids):
        assert llm.built.engine.scheduler.num_preemptions > 0


def test_equal_inputs_share_what_the_encoder_made(checkpoint: Any) -> None:
    folder, inputs, targets, expected = checkpoint
    twice = [inputs[1]] * 3
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(folder), device="reference", dtype="float32", skip_tokenizer_init=True) as llm:
        engine = llm.built.engine
        cross = engine.scheduler.block_manager.cross
        assert cross is not None
        needed = []
        for i, source in enumerate(twice):
            engine.add(str(i), targets[1], params, encoder=source, final_only=True)
        while engine.has_unfinished():
            for output in engine.step():
                assert output.outputs[0].token_ids == expected[1]
            needed.append(cross.pool.num_blocks - 1 - cross.pool.num_free)
        assert max(needed) == -(-inputs[1].num_tokens(llm.built.model.spec.encoder) // 16)
        engine.add("again", targets[1], params, encoder=inputs[1], final_only=True)
        engine.step()
        assert not engine.scheduler._running.requests or not engine.scheduler._running.requests[0].is_encoding


def test_a_request_without_an_encoder_prompt_is_refused(checkpoint: Any) -> None:
    folder, inputs, targets, _ = checkpoint
    with LLM(str(folder), device="reference", dtype="float32", skip_tokenizer_init=True) as llm:
        with pytest.raises(RequestError, match="encoder of this model needs"):
            llm.built.engine.add("1", targets[0], SamplingParams())
        too_long = EncoderInput(token_ids=[3] * 5000)
        if inputs[0].features is not None:
            too_long = EncoderInput(features=np.zeros((9000, 12), np.float32))
        with pytest.raises(RequestError, match="is what the encoder reads"):
            llm.built.engine.add("1", targets[0], SamplingParams(), encoder=too_long)
