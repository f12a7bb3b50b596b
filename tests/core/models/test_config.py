"""Reading config.json: spellings, and an error of its own for everything that can be wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.core.errors import ModelError, ModelNotFound
from headrace.core.models.config import HFConfig, read_config


def test_a_missing_key_is_named_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hiden_size": 5, "head_dim": null}')
    config = read_config(tmp_path)
    with pytest.raises(ModelError, match=r"config\.json lacks the key 'hidden_size'; did you mean hiden_size\?"):
        config.size("hidden_size")
    assert config.file == str(tmp_path / "config.json") and config.model_type == "llama"
    assert config.size("head_dim", 7) == 7 and config.integer("head_dim", 7, null=0) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON: Expecting"),
        (b"", "is not JSON"),
        (b"\xff\xfe{}\xff", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1]", "must hold a JSON object, but it holds a list"),
        (b"null", "must hold a JSON object, but it holds a NoneType"),
    ],
)
def test_a_damaged_file_is_a_model_error(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        read_config(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_folder_without_config_says_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="has no config.json; it is empty") as empty:
        read_config(tmp_path)
    assert "a .gguf file" in str(empty.value)
    (tmp_path / "a.gguf").touch()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelNotFound, match="it holds a.gguf, notes.txt") as caught:
        read_config(tmp_path)
    assert caught.value.remedies == (f"give the file itself: {tmp_path / 'a.gguf'}",)
    with pytest.raises(ModelNotFound, match="there is no folder"):
        read_config(tmp_path / "none")
    with pytest.raises(ModelNotFound, match="there is no folder"):
        read_config(tmp_path / "a.gguf")


def test_a_config_in_a_folder_below_is_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound) as caught:
        read_config(tmp_path)
    assert caught.value.remedies == (f"give the folder {tmp_path / 'snapshot'}",)


def test_config_json_that_is_a_folder_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match="cannot read"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, "float16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"torch_dtype": None}, "float32"),
        ({}, "float32"),
    ],
)
def test_dtype_has_two_spellings(values: dict[str, str], dtype: str) -> None:
    assert HFConfig(values).dtype == dtype


def test_rope_parameters_have_three_spellings() -> None:
    old = HFConfig({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    flat = HFConfig({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}})
    nested = HFConfig({"rope_parameters": {"full_attention": dict(flat["rope_parameters"])}})
    for config in (old, flat, nested):
        parameters = config.rope_parameters("full_attention")
        assert parameters.text("rope_type") == "linear" and parameters.number("rope_theta") == 5e5
    with pytest.raises(ModelError, match="rope parameters for full_attention, but not for 'sliding_attention'"):
        nested.rope_parameters("sliding_attention")


def test_numbers_are_checked() -> None:
    config = HFConfig({"a": 4.0, "b": 4.5, "c": True, "d": -1, "e": float("inf"), "f": "4", "g": 3})
    assert config.size("a") == 4 and config.number("g") == 3.0 and "a" in config
    for name in "bcdf":
        with pytest.raises(ModelError, match=f"{name} in config.json must be an integer"):
            config.integer(name)
    for name in "cef":
        with pytest.raises(ModelError, match=f"{name} in config.json must be a finite number"):
            config.number(name)
    with pytest.raises(ModelError, match="a in config.json must be a string"):
        config.text("a")


@pytest.mark.parametrize("value", [3, "7", [1, "2"], [True], [-1], [1.5]])
def test_indices_are_checked(value: object) -> None:
    assert HFConfig({"layers": [0, 7]}).indices("layers") == (0, 7)
    with pytest.raises(ModelError, match="layers.* a list of integers from 0"):
        HFConfig({"layers": value}).indices("layers")
    with pytest.raises(ModelError, match="lacks the key 'layers': it is null"):
        HFConfig({"layers": None}).indices("layers")


@pytest.mark.parametrize("value", [10**400, -(10**400), float("inf"), float("nan"), True, "1"])
def test_numbers_are_finite(value: object) -> None:
    with pytest.raises(ModelError, match="rope_theta in config.json must be a finite number"):
        HFConfig({"rope_theta": value}).number("rope_theta")


def test_with_defaults_keeps_null() -> None:
    config = HFConfig({"sliding_window": None}).with_defaults(sliding_window=4096, other=1)
    assert config.integer("sliding_window", null=0) == 0 and config["other"] == 1
    assert config.replace(other=2)["other"] == 2 and config["other"] == 1


def test_reading_a_spec_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,'
        '"num_attention_heads": 2}'
    )
    program = f"""
import sys
from pathlib import Path
from headrace.core.models.config import read_config
from headrace.core.models.declare import declare_params
from headrace.core.models.gguf_config import config_from_gguf
from headrace.core.models.registry import read_spec
assert declare_params(read_spec(read_config(Path({str(tmp_path)!r}))))
assert not {{"torch", "transformers", "jax"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
