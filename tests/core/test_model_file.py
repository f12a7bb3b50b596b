"""Folders of checkpoints with links that lead nowhere, pipes and folders where files should be: named, never read."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from headrace import LLM
from headrace.core.errors import ModelError
from headrace.core.weights.open import open_weights
from tiny_server_model import tiny_server_model


def make_link(path: Path) -> None:
    path.symlink_to("nowhere")


def make_loop(path: Path) -> None:
    path.symlink_to(path.name)


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_pointer(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9085657\n")


NO_FILES = [
    (make_link, "is a link to nowhere, which is not there"),
    (make_loop, "cannot be read: Too many levels of symbolic links"),
    (os.mkfifo, "is a device, a pipe or a socket, not a file"),
    (make_device, "is a device, a pipe or a socket, not a file"),
    (os.mkdir, "is a folder, not a file"),
    (make_pointer, "is a Git LFS pointer, not the file"),
]
NAMES = [
    "config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
    "chat_template.jinja", "chat_templates/one.jinja", "tokenizer.model", "modules.json", "preprocessor_config.json",
    "config_sentence_transformers.json",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_file_is_named(name: str, tmp_path: Path) -> None:
    model = tiny_server_model(tmp_path / "whole")
    for number, (make, what) in enumerate(NO_FILES):
        folder = tmp_path / str(number)
        shutil.copytree(model, folder)
        path = folder / name
        path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        make(path)
        with pytest.raises(ModelError) as caught:
            LLM(str(folder), device="null", load_format="dummy", max_model_len=64)
        assert caught.value.reason == f"{path} {what}"


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "only.safetensors"])
@pytest.mark.parametrize(("make", "what"), NO_FILES)
def test_weights_that_are_no_file_are_named(
    make: Callable[[Path], None], what: str, name: str, tmp_path: Path
) -> None:
    make(tmp_path / name)
    with pytest.raises(ModelError, match=what):
        open_weights(tmp_path)


def test_a_shard_that_is_no_file_is_named(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"a": np.zeros(2, np.float32)}, tmp_path / "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    os.mkfifo(tmp_path / "two.safetensors")
    with pytest.raises(ModelError, match="two.safetensors is a device, a pipe or a socket"):
        open_weights(tmp_path)


def test_links_to_files_are_files(tmp_path: Path) -> None:
    model = tiny_server_model(tmp_path / "whole")
    folder = tmp_path / "links"
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).symlink_to(path)
    LLM(str(folder), device="null", load_format="dummy", max_model_len=64).close()


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["2", [1, "x"], 2.0, True, {}])
def test_ends_that_are_no_token_ids(tmp_path: Path, file: str, value: object) -> None:
    """Passed over, they would leave texts without an end."""
    path = tiny_server_model(tmp_path / "tiny") / file
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**config, "eos_token_id": value}))
    with pytest.raises(ModelError, match=rf"eos_token_id in .*/{file} must be a token id or a list"):
        LLM(str(path.parent), device="null", load_format="dummy", kv_memory="8MiB")
