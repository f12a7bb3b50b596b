"""Families whose ops are more than those of a plain decoder, as native programs without torch: the definitions'
numbers, and the same bits in any batch."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from encoder_cases import CASES as ENCODERS
from encoder_cases import Case as EncoderCase
from encoder_cases import make_checkpoint
from headrace import LLM, SamplingParams
from tiny_checkpoints import save_golden_case, save_tiny

pytest.importorskip("headrace.kernels.cpu._ops", reason="the native kernels were not built")

Floats = npt.NDArray[Any]
OPTIONS: dict[str, Any] = dict(dtype="float32", skip_tokenizer_init=True, kv_memory="16MiB", block_size=4)
PROMPTS = [list(range(3, 40)), [7], list(range(90, 60, -1)), list(range(3, 20))]
TOLERANCE = 2e-4
LOOSE = {"zamba2": 5e-4}
"""Tiny Zamba 2 magnifies rounding: between two tiers of instructions it moves by 1e-4."""
EXPERTS = ("mixtral", "phimoe", "llama4_text", "gpt_oss", "deepseek_v3")
DECODERS = (
    *EXPERTS,
    "apertus",
    "mamba",
    "mamba2",
    "qwen3_next",
    "lfm2",
    "rwkv",
    "recurrent_gemma",
    "longcat_flash",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "qwen2_moe", "deepseek_v2", "minicpm3", "glm4_moe", "jamba", "bamba", "nemotron_h", "falcon_h1",
            "qwen3_5_moe", "zamba2", "lfm2_moe", "granitemoehybrid", "olmoe",
        )
    ),
)  # fmt: skip


def logprobs(folder: Path, device: str, prompts: Sequence[list[int]] = PROMPTS, **options: Any) -> list[Floats]:
    """Of each prompt, log probabilities of its tokens and of three more."""
    params = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=0, logprobs=0)
    with LLM(str(folder), device=device, **{**OPTIONS, **options}) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    found = []
    for output in outputs:
        steps = (*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ()))
        found.append(np.array([next(iter(step.values())).logprob for step in steps if step]))
    return found


@pytest.mark.parametrize("name", DECODERS)
def test_decoders(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    save_golden_case(tmp_path / "model", name)
    expected = logprobs(tmp_path / "model", "reference")
    caplog.clear()
    with caplog.at_level("INFO"):
        together = logprobs(tmp_path / "model", "cpu")
    assert "device=cpu" in caplog.text
    assert not [record for record in caplog.records if record.levelname == "WARNING" and "torch" in record.message]
    for ours, theirs in zip(together, expected, strict=True):
        assert (np.abs(ours - theirs) < LOOSE.get(name, TOLERANCE) * np.maximum(1, np.abs(theirs))).all()
    in_pieces = logprobs(tmp_path / "model", "cpu", max_num_batched_tokens=11, threads=1)
    alone = [logprobs(tmp_path / "model", "cpu", [prompt])[0] for prompt in PROMPTS[:2]]
    for whole, pieces in zip(together, in_pieces, strict=True):
        assert np.array_equal(whole, pieces)
    for whole, one in zip(together, alone, strict=False):
        assert np.array_equal(whole, one)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "qwen3_next"])
def test_narrow_dtypes(tmp_path: Path, name: str, dtype: str) -> None:
    save_golden_case(tmp_path / "model", name)
    ours, theirs = (logprobs(tmp_path / "model", device, dtype=dtype) for device in ("cpu", "reference"))
    exact = np.concatenate(logprobs(tmp_path / "model", "reference"))
    error, noise = (np.square(np.concatenate(found) - exact).mean() for found in (ours, theirs))
    assert error < 2 * noise + 1e-9


@pytest.mark.parametrize("quantize", ["int8", "int8-channel"])
def test_quantized_experts(tmp_path: Path, quantize: str) -> None:
    """The reference rounds the same weights, and the activations not at all."""
    save_golden_case(tmp_path / "model", "mixtral")
    ours, rounded = (logprobs(tmp_path / "model", device, quantize=quantize) for device in ("cpu", "reference"))
    exact = logprobs(tmp_path / "model", "reference")
    # Of most tokens: a rounded activation may choose another expert.
    assert np.median(np.abs(np.concatenate(ours) - np.concatenate(rounded))) < 0.1
    assert np.median(np.abs(np.concatenate(rounded) - np.concatenate(exact))) > 1e-3
    alone = logprobs(tmp_path / "model", "cpu", PROMPTS[2:3], quantize=quantize, max_num_batched_tokens=7)
    assert np.array_equal(alone[0], ours[2])


@pytest.mark.parametrize("case", [case for case in ENCODERS if case.classifies], ids=lambda case: case.name)
def test_encoders(tmp_path: Path, case: EncoderCase, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_checkpoint(case, tmp_path, "AutoModelForSequenceClassification")
    texts = [prompt[:60] for prompt in PROMPTS]
    vectors = {}
    for device in ("reference", "cpu"):
        with LLM(str(folder), device=device, **{**OPTIONS, "kv_memory": "auto"}) as llm:
            vectors[device] = classes(llm, texts)
            alone = np.concatenate([classes(llm, [text]) for text in texts])
    assert np.abs(vectors["cpu"] - vectors["reference"]).max() < TOLERANCE * vectors["reference"].std()
    assert np.array_equal(vectors["cpu"], alone)
    assert "no native program" not in caplog.text and "without a native form" not in caplog.text


def classes(llm: LLM, texts: Sequence[list[int]]) -> Floats:
    """Scores of labels, [n, labels]."""
    outputs = llm.classify([{"prompt_token_ids": text} for text in texts])
    return np.array([output.probs for output in outputs])


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_decoders_as_embedders(tmp_path: Path, pooling: str, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny(tmp_path / "model", "qwen3")
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    vectors = {}
    for device in ("reference", "cpu"):
        with LLM(str(tmp_path / "model"), device=device, pooling=pooling, **OPTIONS) as llm:
            vectors[device] = np.array([output.embedding for output in llm.embed(prompts)])
            alone = np.array([llm.embed(prompt)[0].embedding for prompt in prompts])
    assert np.abs(vectors["cpu"] - vectors["reference"]).max() < TOLERANCE
    assert np.array_equal(vectors["cpu"], alone)
    assert "no native program" not in caplog.text


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "qwen3_next", "bert"])
def test_torch_is_not_needed(tmp_path: Path, name: str) -> None:
    """In a process where importing it fails."""
    if name == "bert":
        make_checkpoint(ENCODERS[0], tmp_path / "model", "AutoModelForSequenceClassification")
    else:
        save_golden_case(tmp_path / "model", name)
    call = "llm.classify(prompt)" if name == "bert" else "llm.generate(prompt)"
    program = f"""
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from headrace import LLM
with LLM({str(tmp_path / "model")!r}, device="cpu", dtype="float32", skip_tokenizer_init=True) as llm:
    prompt = [{{"prompt_token_ids": [5, 6, 7]}}]
    print(len({call}))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and run.stdout.strip() == "1", run.stderr
