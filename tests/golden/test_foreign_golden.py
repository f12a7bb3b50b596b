"""Models of no family: transformers' own code with our paged attention, against transformers' generate."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace import LLM, SamplingParams
from headrace.core.errors import HeadraceError, ModelError, Unsupported, WeightError
from headrace.core.models import registry
from paged_model import Case, make_checkpoint
from tiny_checkpoints import greedy_tokens

NUM_TOKENS = 16
COMMON: dict[str, Any] = {"dtype": "float32", "kv_memory": "16MiB", "skip_tokenizer_init": True}
PROMPTS = [[(5 * i + 7 * n) % 120 + 3 for i in range(n)] for n in (1, 17, 3, 33, 9)]
PROMPTS.append(PROMPTS[3][:28] + [4, 9])
CASES = [
    Case("llama", "llama", {}),
    Case("gemma2", "gemma2", {"sliding_window": 6, "head_dim": 16, "query_pre_attn_scalar": 16}),
    Case("gpt_oss", "gpt_oss", {"sliding_window": 6, "head_dim": 16}),
    Case("deepseek_v3", "deepseek_v3", {"num_key_value_heads": 4}),
    Case("bitnet", "bitnet", {}),
    Case("beam", "beam", {}),
    Case("vaultgemma", "vaultgemma", {"sliding_window": 6, "head_dim": 16, "query_pre_attn_scalar": 16}),
]
"""Families whose files are hidden here (windows, softcap, sinks, values smaller than keys), and others."""
REFUSED = {
    "mamba": "0 of its 4 layers attend",
    "bloom": "0 of its 3 layers attend",
    "t5": "an encoder and a decoder",
    "bert": "other logits",
    "jetmoe": "depends on the numbers that they compute",
    "diffllama": "attends twice for each token",
    "doge": "neither causal nor a sliding window",
}
"""Each with a part of the reason."""


@pytest.fixture(autouse=True)
def no_families(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of the model types here none has a file, whatever families there are."""
    hidden = {case.model_type for case in CASES} | set(REFUSED)
    names = tuple(name for name in registry.family_names() if name not in hidden)
    monkeypatch.setattr(registry, "family_names", lambda: names)
    torch.set_num_threads(1)
    registry.find_family.cache_clear()
    yield
    registry.find_family.cache_clear()


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(folder, expected tokens per prompt)."""
    folder = make_checkpoint(request.param, tmp_path_factory.mktemp(request.param.name))
    oracle = load_oracle(folder)
    return folder, [greedy_tokens(oracle, prompt, NUM_TOKENS) for prompt in PROMPTS]


def load_oracle(folder: Path) -> Any:
    """transformers' model of a folder."""
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def run(folder: Path, **options: Any) -> tuple[list[list[int]], LLM]:
    """Token ids of all prompts together."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    options = {"device": "reference", "threads": 1, **COMMON, **options}
    with LLM(str(folder), **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
        llm.built.engine.scheduler.check_integrity()
        return [output.outputs[0].token_ids for output in outputs], llm


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7, "block_size": 4}, {"device": "cpu"}])
def test_greedy_tokens_equal_transformers(
    checkpoint: Any, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    folder, expected = checkpoint
    tokens, llm = run(folder, **options)
    assert tokens == expected
    assert llm.built.model.spec.foreign is not None
    assert "it is not one of the families (slow)" in caplog.text


def test_prefix_hits_and_log_probabilities(tmp_path: Path) -> None:
    folder = make_checkpoint(CASES[0], tmp_path)
    model = load_oracle(folder)
    prompt = PROMPTS[3]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    plain = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with LLM(str(folder), device="reference", threads=1, block_size=4, **COMMON) as llm:
        [first] = llm.generate({"prompt_token_ids": prompt}, params)
        [second] = llm.generate({"prompt_token_ids": prompt}, plain)
    assert second.num_cached_tokens == 32 and second.outputs[0].token_ids == first.outputs[0].token_ids
    with torch.inference_mode():
        want = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert first.prompt_logprobs is not None and first.outputs[0].logprobs is not None
    for position, entry in enumerate(first.prompt_logprobs[1:], 1):
        assert entry is not None
        assert entry[prompt[position]].logprob == pytest.approx(want[position - 1, prompt[position]].item(), abs=1e-4)
    token = first.outputs[0].token_ids[0]
    assert first.outputs[0].logprobs[0][token].logprob == pytest.approx(want[-1].max().item(), abs=1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_paged_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    from paged_model import tiny_sizes

    config = AutoConfig.for_model(name, **tiny_sizes(Case(name, name, {})))
    auto: Any = AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM
    auto.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=REFUSED[name]):
        run(tmp_path)


def test_names_of_weights_are_checked(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_checkpoint(CASES[0], tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.q_projection.weight"] = tensors.pop("model.layers.0.self_attn.q_proj.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightError, match=r"missing: model\.layers\.0\.self_attn\.q_proj\.weight"):
        run(folder)


def test_dummy_weights_need_no_checkpoint(tmp_path: Path) -> None:
    folder = make_checkpoint(CASES[0], tmp_path)
    (folder / "model.safetensors").unlink()
    tokens, _ = run(folder, load_format="dummy")
    assert all(len(ids) == NUM_TOKENS for ids in tokens)


def test_a_device_without_torch_names_the_gap(tmp_path: Path) -> None:
    folder = make_checkpoint(CASES[0], tmp_path)
    with pytest.raises(Unsupported, match="foreign_code"):
        run(folder, device="sim")


CUSTOM = """
from transformers import LlamaConfig, LlamaForCausalLM
class OddConfig(LlamaConfig):
    model_type = "odd_one"
class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig
"""


def test_code_of_a_folder_runs_only_when_it_is_trusted(tmp_path: Path) -> None:
    folder = make_checkpoint(CASES[0], tmp_path)
    model = load_oracle(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "odd_one",
        "architectures": ["OddForCausalLM"],
        "auto_map": {"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.OddForCausalLM"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "odd.py").write_text(CUSTOM)
    with pytest.raises(HeadraceError, match="odd_one") as caught:
        run(folder)
    assert any("HEADRACE_TRUST_REMOTE_CODE=1" in remedy for remedy in caught.value.remedies)
    tokens, _ = run(folder, trust_remote_code=True)
    assert tokens == [greedy_tokens(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
