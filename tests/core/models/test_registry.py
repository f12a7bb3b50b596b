"""Families are files: found by name, each complete, and an unknown one named with its neighbours."""

import inspect
import pkgutil
import re

import pytest

from headrace.core.errors import ModelError
from headrace.core.models import (
    dense_families,
    encoder_families,
    families,
    gemma_families,
    gpt_families,
    hybrid_families,
    latent_families,
    mixture_families,
)
from headrace.core.models.aliases import ALIASES
from headrace.core.models.config import HFConfig
from headrace.core.models.registry import RECIPES, family_names, find_family, read_spec
from headrace.core.models.wrappers import WRAPPERS


def test_every_family_of_the_foundation_is_there() -> None:
    wanted = {"gemma2", "gemma3_text", "gpt2", "llama", "mistral", "phi3", "qwen2", "qwen3"}
    assert wanted <= set(family_names()) and list(family_names()) == sorted(family_names())


FILES = [module.name for module in pkgutil.iter_modules(families.__path__)]


@pytest.mark.parametrize("name", FILES)
def test_a_family_is_a_small_file_with_spec_names_and_docstring(name: str) -> None:
    family = find_family(name)
    module = inspect.getmodule(family.translate)
    assert module is not None and module.__name__ == f"{families.__name__}.{name}"
    assert module.__doc__ and family.translate.__doc__ and family.weights.entries
    assert len(inspect.getsource(module).splitlines()) <= 90


@pytest.mark.parametrize("name", RECIPES)
def test_a_family_may_be_an_entry_of_a_table_that_says_above_it_what_it_is(name: str) -> None:
    assert find_family(name).weights.entries
    of_decoders = (dense_families, gemma_families, gpt_families, hybrid_families, latent_families, mixture_families)
    tables = "".join(inspect.getsource(module) for module in (*of_decoders, encoder_families))
    assert re.search(rf'^    # .+\n    "{name}": recipe\(', tables, re.MULTILINE)


def test_dashes_stand_for_underscores() -> None:
    assert find_family("gemma3-text").name == "gemma3_text"


def test_an_unknown_model_type_lists_near_names_and_all_families() -> None:
    with pytest.raises(ModelError, match="model_type 'qwen22' is not served; did you mean qwen2") as caught:
        find_family("qwen22")
    assert all(name in str(caught.value) for name in family_names())


@pytest.mark.parametrize("model_type", ["", "__init__", "..", "llama.py", "os.path"])
def test_a_model_type_cannot_import_anything_else(model_type: str) -> None:
    with pytest.raises(ModelError, match="is not served"):
        find_family(model_type)


def test_errors_of_a_language_model_inside_another_name_where_its_config_lies() -> None:
    with pytest.raises(ModelError, match="hidden_size in text_config of config.json must be"):
        read_spec(HFConfig({"model_type": "gemma3", "text_config": {"hidden_size": "wide"}}))


def test_model_types_are_files_entries_aliases_or_wrappers_and_never_two_of_them() -> None:
    files = set(FILES)
    assert not files & ALIASES.keys() and not set(family_names()) & WRAPPERS.keys()
    assert not (files | ALIASES.keys()) & RECIPES.keys()
    assert {like for like, _ in ALIASES.values()} <= files | RECIPES.keys()
    assert set(WRAPPERS.values()) <= set(family_names())


def test_a_config_without_model_type_says_so() -> None:
    with pytest.raises(ModelError, match="config.json lacks the key 'model_type'"):
        read_spec(HFConfig({"hidden_size": 5}))


def test_a_list_of_layers_with_experts_of_another_length_is_named() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4}
    config = HFConfig(
        {"model_type": "jamba", **sizes, "num_attention_heads": 8, "mlp_layer_types": ["sparse", "dense"]}
    )
    with pytest.raises(ModelError, match="has 4 layers, but says of 2 whether they have experts"):
        read_spec(config)
