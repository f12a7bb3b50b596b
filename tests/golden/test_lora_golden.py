"""Adapters beside each other in one batch, against transformers with each of them merged into the weights."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from headrace import LLM, RequestOutput, SamplingParams
from headrace.core.errors import RequestError
from lora_files import ALL, write_lora
from tiny_checkpoints import greedy_tokens, save_golden_case, save_tiny

Made = tuple[Path, dict[str, PreTrainedModel]]
"""The folder of a model, and by adapter, "" for none, what transformers makes of it."""
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, prompt_logprobs=1)
GOLDEN = {
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h"),
    "bloom": ("query_key_value", "dense_4h_to_h"),
    "falcon": ("query_key_value", "dense"),
    "qwen2_moe": (*ALL[:4], "shared_expert.gate_proj", "shared_expert.down_proj"),
}
TARGETS = {
    "llama": ALL, "qwen2": ("q_proj", "v_proj"), "gemma2": ("o_proj", "up_proj"), **GOLDEN,
    "phi3": ("qkv_proj", "gate_up_proj"), "gpt2": ("c_attn", "c_proj", "c_fc"),
}  # fmt: skip
"""What the first adapter of a family adds to."""


def prompts() -> list[list[int]]:
    """Awkward lengths; some share a prefix."""
    rng = random.Random(5)
    made = [[rng.randrange(3, 250) for _ in range(n)] for n in (1, 5, 17, 40)]
    return [*made, made[-1][:36] + [7, 8, 9], made[-1]]


FIRST = ("gpt2", "llama", "gpt_neox")
"""Families of the default run: in parts, transposed, interleaved."""


@pytest.fixture(
    scope="module",
    params=[name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in sorted(TARGETS)],
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder, family = tmp_path_factory.mktemp(request.param) / "model", request.param
    model = (save_golden_case if family in GOLDEN else save_tiny)(folder, family)
    targets = TARGETS[family]
    models = {
        "": model,
        "wide": write_lora(folder.parent / "wide", model, targets, seed=1, rank=8),
        "narrow": write_lora(folder.parent / "narrow", model, targets[-1:], seed=2, rank=3, use_rslora=True),
    }
    return folder, models


def load(folder: Path, **options: Any) -> LLM:
    given = {"device": "reference", "dtype": "float32", "kv_memory": "16MiB", "block_size": 4, **options}
    lora = {name: str(folder.parent / name) for name in ("wide", "narrow")}
    return LLM(str(folder), skip_tokenizer_init=True, **{"lora": lora, **given})


def run(llm: LLM, names: Sequence[str], batch: Sequence[list[int]]) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in batch], PARAMS, lora=names)


def check(models: dict[str, PreTrainedModel], names: Sequence[str], outputs: Sequence[RequestOutput]) -> None:
    """Log probabilities of prompt and output, and greedy tokens, are those of the merged models."""
    for name, output in zip(names, outputs, strict=True):
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        with torch.inference_mode():
            logits = models[name](torch.tensor([tokens]), use_cache=False).logits[0]
        assert logits[len(output.prompt_token_ids) - 1 : -1].argmax(-1).tolist() == output.outputs[0].token_ids, name
        want = logits.log_softmax(-1)
        assert output.prompt_logprobs is not None
        for i, found in enumerate(output.prompt_logprobs[1:], 1):
            assert found is not None
            assert found[tokens[i]].logprob == pytest.approx(want[i - 1, tokens[i]].item(), abs=2e-3), (name, i)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7, "device": "cpu"},
        {"device": "cpu", "speculative": "ngram"},
        {"device": "cpu", "dtype": "float32", "max_num_seqs": 2, "prefix_caching": False},
    ],
    ids=str,
)
def test_a_mixed_batch_equals_merged_models(made: Made, options: dict[str, Any]) -> None:
    folder, models = made
    names = ["wide", "", "narrow"] * 4
    batch = prompts() + prompts()[::-1]
    with load(folder, **options) as llm:
        check(models, names, run(llm, names, batch))
        check(models, names[::-1], run(llm, names[::-1], batch))  # with what the prefix cache holds of others
        llm.built.engine.scheduler.check_integrity()


def test_adapters_that_come_later(made: Made) -> None:
    folder, models = made
    for device in ("reference", "cpu"):
        with load(folder, device=device, lora={}, max_loras=2, max_lora_rank=8) as llm:
            batch, names = prompts()[:3], ["", "narrow", "wide"]
            llm.load_lora("wide", folder.parent / "wide")
            llm.load_lora("narrow", folder.parent / "narrow")
            check(models, names, run(llm, names, batch))
            llm.unload_lora("wide")
            assert llm.loras == ("narrow",)
            llm.load_lora("wide", folder.parent / "narrow")  # in the place that the other had
            check(models, ["", "narrow", "narrow"], run(llm, names, batch))
            with pytest.raises(RequestError, match="no place for adapter 'third'"):
                llm.load_lora("third", folder.parent / "wide")


def test_the_prefix_cache_tells_adapters_apart(made: Made) -> None:
    folder, models = made
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    prompt = prompts()[3]
    with load(folder, device="cpu") as llm:
        for num_cached in (0, 36):
            for name in ("", "wide", "narrow"):
                [output] = llm.generate({"prompt_token_ids": prompt}, params, lora=name)
                assert output.num_cached_tokens == num_cached, name
                assert output.outputs[0].token_ids == greedy_tokens(models[name], prompt, 6)
