"""Adapters that cannot be served are errors which name the adapter's file, key or tensor; and room that they take."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from headrace import LLM, SamplingParams
from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError, HeadraceError, ModelError, RequestError, Unsupported, WeightError
from headrace.core.llm_inputs import TokensPrompt
from headrace.core.memory_plan import Target, plan_model
from headrace.core.platform import Memory
from lora_files import ALL, write_lora
from tiny_checkpoints import save_tiny

Tensors = dict[str, torch.Tensor]
Q = "base_model.model.model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, save_tiny(folder, "llama", num_hidden_layers=2)


@pytest.fixture
def adapter(model: tuple[Path, PreTrainedModel], tmp_path: Path) -> Path:
    write_lora(tmp_path / "a", model[1], ALL, seed=0)
    return tmp_path / "a"


def load(model: tuple[Path, PreTrainedModel], lora: Any, **options: Any) -> LLM:
    given = {"device": "reference", "kv_memory": "4MiB", "skip_tokenizer_init": True, **options}
    return LLM(str(model[0]), lora=lora, **given)


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return edit


def edit_tensors(change: Callable[[Tensors], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return edit


def rename(old: str, new: str) -> Callable[[Tensors], Any]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


@pytest.mark.parametrize(
    ("damage", "kind", "parts"),
    [
        (edit_config(use_dora=True), ModelError, ["adapter_config.json", "use_dora", "DoRA"]),
        (edit_config(bias="all"), ModelError, ["bias 'all'"]),
        (edit_config(modules_to_save=["lm_head"]), ModelError, ["modules_to_save"]),
        (edit_config(target_parameters=["experts.up"]), ModelError, ["target_parameters"]),
        (edit_config(peft_type="IA3"), ModelError, ["peft_type 'IA3'"]),
        (edit_config(init_lora_weights="pissa"), ModelError, ["init_lora_weights 'pissa'", "changed weights"]),
        (edit_config(r="4"), ModelError, ["r must be a positive number, got '4'"]),
        (edit_config(lora_alpha=None), ModelError, ["lora_alpha must be a positive number, got None"]),
        (edit_config(rank_pattern=[4]), ModelError, ["rank_pattern must map names"]),
        (edit_config(alpha_pattern={"(": 3}), ModelError, ["'('", "no regular expression"]),
        (edit_config(r=8), WeightError, ["down_proj.lora_A.weight is [4, 96], expected 8 rows"]),
        (edit_tensors(lambda t: t.pop(f"{Q}.lora_B.weight")), WeightError, [f"{Q}.lora_A.weight has no other half"]),
        (
            edit_tensors(lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(4, 63)})),
            WeightError,
            [f"{Q}.lora_A.weight is [4, 63], expected [4, 64]", "another model"],
        ),
        (
            edit_tensors(lambda t: t.update({f"{Q}.lora_B.weight": torch.zeros(60, 4)})),
            WeightError,
            [f"{Q}.lora_B.weight is [60, 4], expected [64, 4]"],
        ),
        (
            edit_tensors(lambda t: t.update({f"{Q}.lora_B.weight": torch.full((64, 4), torch.nan)})),
            WeightError,
            [f"tensor {Q}.lora_B.weight holds a NaN or an infinity"],
        ),
        (
            edit_tensors(lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(4, 64, dtype=torch.int32)})),
            WeightError,
            [f"{Q}.lora_A.weight holds int32"],
        ),
        (
            edit_tensors(lambda t: t.update({f"{Q}.lora_A.default.weight": torch.zeros(4, 64)})),
            WeightError,
            ["stands there twice"],
        ),
        (
            edit_tensors(lambda t: t.update({f"{Q}.lora_magnitude_vector": torch.zeros(64)})),
            WeightError,
            ["lora_magnitude_vector is no lora_A.weight or lora_B.weight"],
        ),
        (
            edit_tensors(rename("layers.1.self_attn.q_proj", "layers.7.self_attn.q_proj")),
            WeightError,
            ["model.layers.7.self_attn.q_proj.weight", "no linear layer of this model is called so"],
        ),
        (
            edit_tensors(rename("model.model.layers.1.self_attn.q_proj", "model.lm_head")),
            WeightError,
            ["lm_head.lora_A.weight adds to lm_head.weight", "not served"],
        ),
        (lambda folder: (folder / "adapter_config.json").unlink(), ModelError, ["has no adapter_config.json"]),
        (
            lambda folder: (folder / "adapter_model.safetensors").unlink(),
            ModelError,
            ["no adapter_model.safetensors"],
        ),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), ModelError, ["is damaged"]),
        (
            lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\x00" * 64),
            WeightError,
            ["adapter_model.safetensors"],
        ),
        (edit_tensors(lambda t: t.clear()), WeightError, ["holds no tensor"]),
    ],
)
def test_what_cannot_be_served_is_named(
    model: tuple[Path, PreTrainedModel],
    adapter: Path,
    damage: Callable[[Path], Any],
    kind: type[HeadraceError],
    parts: list[str],
) -> None:
    damage(adapter)
    with pytest.raises(kind) as caught:
        load(model, {"a": adapter})
    for part in parts:
        assert part in caught.value.reason


def test_names_of_adapters(model: tuple[Path, PreTrainedModel], adapter: Path) -> None:
    prompt, params = TokensPrompt(prompt_token_ids=[5, 6, 7]), SamplingParams(max_tokens=1)
    with load(model, {"mine": str(adapter)}) as llm:
        with pytest.raises(RequestError, match="no adapter 'min'; there are mine; did you mean mine") as caught:
            llm.generate(prompt, params, lora="min")
        assert caught.value.code == "lora_not_found"
        with pytest.raises(RequestError, match="lora must be the name of an adapter, got"):
            llm.generate(prompt, params, lora=[3])  # type: ignore[list-item]
        with pytest.raises(RequestError, match="2 prompts need 2 lora, got 1"):
            llm.generate([prompt, prompt], params, lora=["mine"])
    with load(model, ()) as llm, pytest.raises(RequestError, match="no adapter 'mine'; none was loaded"):
        llm.generate(prompt, params, lora="mine")


@pytest.mark.parametrize(
    ("lora", "reason"),
    [
        (["mine"], "lora must be NAME=FOLDER"),
        (["=x"], "lora must be NAME=FOLDER"),
        (["a b=x"], "lora must be NAME=FOLDER"),
        (["a=x", "a=y"], "lora names 'a' twice: x and y"),
        (5, "lora must be a list of texts, got 5"),
        ([5], "lora must be a list of texts"),
    ],
)
def test_settings_that_are_no_adapters(lora: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineConfig.from_options({"lora": lora})


def test_models_without_adapters(model: tuple[Path, PreTrainedModel], adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="takes no adapters here: it makes vectors"):
        load(model, {"a": adapter}, pooling="mean")
    with pytest.raises(Unsupported, match="adapters are not cut over 2 devices"):
        load(model, {"a": adapter}, device="sim", tensor_parallel_size=2)
    with pytest.raises(ModelError, match="adapter a: there is no folder"):
        load(model, {"a": tmp_path / "nothing"})


def test_the_plan_counts_adapters(model: tuple[Path, PreTrainedModel], adapter: Path, tmp_path: Path) -> None:
    write_lora(tmp_path / "b", model[1], ("q_proj",), seed=0, rank=16)

    def plan(lora: dict[str, str]) -> Any:
        config = EngineConfig.from_options({"model": str(model[0]), "dtype": "bfloat16", "lora": lora})
        target = Target(name="a box", memory=Memory(total_bytes=1 << 27, free_bytes=1 << 26))
        return plan_model(config, target, lambda line: None)

    bare, both = plan({}), plan({"a": str(adapter), "b": str(tmp_path / "b")})
    assert both.num_params == bare.num_params
    # Two places of a layer: q, k and v one above the other are of rank 12 in the first and 16 in the second; o, gate
    # and up, and down of rank 4, 8 and 4. Beside them the table of three choices.
    sizes = 16 * (64 + 128) + 4 * (64 + 64) + 8 * (64 + 192) + 4 * (96 + 64)
    assert both.weights_bytes - bare.weights_bytes == 2 * 2 * 2 * sizes + 2 * 9
