"""The language model inside a multimodal checkpoint against the whole model of transformers, given text alone."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.core.errors import WeightError
from headrace.core.models.wrappers import UNREAD, WRAPPERS
from paged_model import load_folder
from recent_cases import RECENT_FLAGS
from wrapper_cases import WRAPPER_CASES, WrapperCase, check_text, make_wrapper

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("case", [case for case in WRAPPER_CASES if case.is_reversible], ids=str)
def test_text_of_a_published_checkpoint(case: WrapperCase, tmp_path: Path) -> None:
    check_text(case, tmp_path, as_published=True)


@pytest.mark.parametrize("case", WRAPPER_CASES, ids=str)
def test_text_of_a_checkpoint_with_todays_names(case: WrapperCase, tmp_path: Path) -> None:
    check_text(case, tmp_path, as_published=False)


def test_every_wrapper_that_transformers_knows_has_a_case() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = {name for name in WRAPPERS if name in CONFIG_MAPPING}
    inside_others = {"qwen2_5_omni", "qwen3_omni_moe"}  # whose text is that of the thinker
    sees_ahead = {"paligemma"}  # whose prompts are no causal text: compared with their images
    among_decoders = {"phi4_multimodal"}  # whose class has no part for its text
    assert among_decoders <= {case.model_type for case in RECENT_FLAGS}
    assert known - {case.model_type for case in WRAPPER_CASES} == inside_others | sees_ahead | among_decoders


@pytest.mark.parametrize(
    "name", ["model.language_model.layers.0.mlp.extra.weight", "model.visions.0.weight", "extra", "visual.x.weight"]
)
def test_a_tensor_of_neither_text_nor_tower_is_an_error(name: str, tmp_path: Path) -> None:
    make_wrapper(WRAPPER_CASES[0]).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), name: torch.zeros(3)}, file, metadata={"format": "pt"})
    with pytest.raises(WeightError, match=f"1 tensor is unexpected .*: {name}"):
        load_folder(tmp_path)


def test_the_modules_that_are_not_read_are_those_of_the_type() -> None:
    types = {name for types in UNREAD.values() for name in types.split()}
    assert types == set(WRAPPERS)


def test_a_missing_tensor_of_the_text_is_an_error(tmp_path: Path) -> None:
    make_wrapper(WRAPPER_CASES[0]).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    gone = next(name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight"))
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, file, metadata={"format": "pt"})
    with pytest.raises(WeightError, match=r"1 tensor is missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_folder(tmp_path)
