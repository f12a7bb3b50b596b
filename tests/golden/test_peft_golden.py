"""Adapters that PEFT itself made, saved and ran: the tokens it gives, and the same bits in any batch."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import PreTrainedModel

from headrace import LLM, RequestOutput, SamplingParams
from tiny_checkpoints import greedy_tokens, save_tiny

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

NUM_TOKENS = 8
PROMPTS = [[5, 9, 100], [7] * 3 + [11, 12, 200, 31], list(range(20, 53))]
EVERY = "all-linear"
ADAPTERS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "some": dict(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]),
        "patterns": dict(
            r=4, lora_alpha=6, use_rslora=True, target_modules=EVERY,
            rank_pattern={"down_proj": 2, r"layers\.0\.self_attn\.k_proj": 7}, alpha_pattern={"(o|up)_proj": 3},
        ),
        "one_layer": dict(r=3, target_modules=["gate_proj"], layers_to_transform=[1], layers_pattern="layers"),
    },
    "gpt2": {
        "turned": dict(r=4, lora_alpha=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True),
        "regex": dict(r=2, lora_alpha=8, target_modules=r".*\.1\.(attn|mlp)\.c_proj", fan_in_fan_out=True),
    },
}  # fmt: skip


def make(folder: Path, family: str) -> tuple[Path, dict[str | None, PreTrainedModel]]:
    """A model's folder with its adapters beside it, and what PEFT makes of each."""
    models: dict[str | None, Any] = {None: save_tiny(folder / "model", family)}
    for seed, (name, settings) in enumerate(ADAPTERS[family].items()):
        torch.manual_seed(seed)
        config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
        base = type(models[None]).from_pretrained(folder / "model", dtype=torch.float32)
        models[name] = peft.get_peft_model(base, config).eval()
        models[name].save_pretrained(folder / name)
    return folder, models


def load(folder: Path, family: str, **options: Any) -> LLM:
    given: dict[str, Any] = {"kv_memory": "16MiB", "skip_tokenizer_init": True, "max_num_seqs": 16, **options}
    return LLM(str(folder / "model"), lora={name: str(folder / name) for name in ADAPTERS[family]}, **given)


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("family", sorted(ADAPTERS))
def test_tokens_are_those_of_peft(family: str, device: str, tmp_path: Path) -> None:
    folder, models = make(tmp_path, family)
    pairs = [(prompt, name) for prompt in PROMPTS for name in models]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with load(folder, family, device=device, dtype="float32") as llm:
        prompts: Any = [{"prompt_token_ids": prompt} for prompt, _ in pairs]
        outputs = llm.generate(prompts, params, lora=[name for _, name in pairs])
    got = [output.outputs[0].token_ids for output in outputs]
    want = [greedy_tokens(models[name], prompt, NUM_TOKENS) for prompt, name in pairs]
    assert got == want
    assert len({str(tokens) for tokens in want}) > len(PROMPTS), "adapters that change nothing show nothing"


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_request_has_the_same_bits_beside_others(quantize: str | None, tmp_path: Path) -> None:
    folder, models = make(tmp_path, "llama")
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)
    pairs: list[tuple[Any, str | None]] = [({"prompt_token_ids": each}, name) for each in PROMPTS for name in models]
    with load(folder, "llama", device="cpu", dtype="bfloat16", prefix_caching=False, quantize=quantize) as llm:
        alone = [llm.generate([prompt], params, lora=[name])[0] for prompt, name in pairs]
        together = llm.generate([prompt for prompt, _ in pairs], params, lora=[name for _, name in pairs])
    assert [numbers(output) for output in together] == [numbers(output) for output in alone]
    with LLM(
        str(folder / "model"), device="cpu", dtype="bfloat16", skip_tokenizer_init=True, quantize=quantize
    ) as llm:
        plain = llm.generate([prompt for prompt, name in pairs if name is None], params)
    assert [numbers(output) for output in plain] == [
        numbers(output) for output, (_, name) in zip(alone, pairs, strict=True) if name is None
    ]


def numbers(output: RequestOutput) -> list[list[tuple[int, float]]]:
    """Token ids and log probabilities, to the bit."""
    steps = output.outputs[0].logprobs or []
    return [[(token, entry.logprob) for token, entry in step.items()] for step in steps]
