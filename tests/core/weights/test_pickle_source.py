"""The pickle reader against torch.save: refused by default, then read with weights_only."""

import builtins
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.core.errors import WeightError
from headrace.core.weights.pickle import PickleSource

STATE = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "turned": torch.arange(6, dtype=torch.float32).reshape(2, 3).T,
    "bf": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "f8": torch.tensor([0.5, 3.0]).to(torch.float8_e4m3fn),
    "n": torch.tensor([1, 2]),
}


def save(path: Path, state: object, **options: Any) -> Path:
    torch.save(state, path, **options)
    return path


@pytest.mark.parametrize("is_zip", [True, False])
def test_reads_what_torch_saved(tmp_path: Path, is_zip: bool) -> None:
    # torch itself cannot load float8 from its old format.
    state = {name: tensor for name, tensor in STATE.items() if is_zip or name != "f8"}
    path = save(tmp_path / "pytorch_model.bin", state, _use_new_zipfile_serialization=is_zip)
    source = PickleSource(path, allow_pickle=True)
    assert set(source.names()) == set(state)
    for name, expected in state.items():
        info, tensor = source.info(name), source.read(name)
        assert info.shape == tensor.shape == tuple(expected.shape) and info.file == str(path)
        assert info.dtype == tensor.dtype == str(expected.dtype).removeprefix("torch.")
        assert info.num_bytes == tensor.data.nbytes == expected.nbytes
        assert tensor.data.tobytes() == expected.contiguous().view(torch.uint8).numpy().tobytes()
    source.close()
    source.close()


def test_refused_unless_allowed(tmp_path: Path) -> None:
    path = save(tmp_path / "pytorch_model.bin", STATE)
    with pytest.raises(WeightError, match="a pickle can run any code.*refused") as caught:
        PickleSource(path, allow_pickle=False)
    assert any("--allow-pickle" in remedy for remedy in caught.value.remedies)
    assert caught.value.file == str(path)


class Attack:
    """Unpickles into a call."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("attacked",)


def test_code_in_a_pickle_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path / "pytorch_model.bin", {"a": Attack()})
    with pytest.raises(WeightError, match=r"pytorch_model.bin: cannot be loaded: "):
        PickleSource(path, allow_pickle=True)
    assert not (tmp_path / "attacked").exists()


def test_missing_torch_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "pytorch_model.bin", STATE)
    real_import = builtins.__import__

    def no_torch(name: str, *rest: Any, **options: Any) -> Any:
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return real_import(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", no_torch)
    with pytest.raises(WeightError, match="needs torch to be read, and torch is not installed") as caught:
        PickleSource(path, allow_pickle=True)
    assert "pip install 'headrace[torch]'" in caught.value.remedies


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([1, 2], "is not a state dict but a list"),
        ({"model": {"a": torch.ones(1)}}, "is not a flat state dict: 'model' is a dict"),
        ({3: torch.ones(1)}, "is not a flat state dict: 3 is a Tensor"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "tensor a is a torch.strided tensor of complex64"),
        ({"a": torch.eye(2).to_sparse()}, "tensor a is a torch.sparse_coo tensor of float32"),
    ],
)
def test_other_contents_are_refused(tmp_path: Path, state: object, message: str) -> None:
    path = save(tmp_path / "pytorch_model.bin", state)
    with pytest.raises(WeightError, match=message) as caught:
        PickleSource(path, allow_pickle=True)
    assert caught.value.file == str(path)


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"PK\x03\x04truncated", b"\x80\x02}q\x00"])
def test_damaged_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(content)
    with pytest.raises(WeightError, match="pytorch_model.bin: cannot be loaded"):
        PickleSource(path, allow_pickle=True)


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "pytorch_model.bin", {"a": torch.ones(1000)})
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(WeightError, match="cannot be loaded"):
        PickleSource(path, allow_pickle=True)


def write_shards(folder: Path, shards: Mapping[str, object], weight_map: dict[str, str]) -> Path:
    for name, state in shards.items():
        save(folder / name, state)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return index


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    shards = {"m-1.bin": {"a": torch.ones(2)}, "m-2.bin": {"b": torch.zeros(3)}}
    source = PickleSource(write_shards(tmp_path, shards, {"a": "m-1.bin", "b": "m-2.bin"}), allow_pickle=True)
    assert list(source.names()) == ["a", "b"]
    np.testing.assert_array_equal(source.read("a").data, np.ones(2, dtype=np.float32))


def test_contradictory_shards_are_refused(tmp_path: Path) -> None:
    shards = {"m-1.bin": {"a": torch.ones(2)}, "m-2.bin": {"a": torch.zeros(3)}}
    with pytest.raises(WeightError, match="m-2.bin: tensor a is a duplicate: m-1.bin has it too"):
        PickleSource(write_shards(tmp_path, shards, {"a": "m-1.bin", "b": "m-2.bin"}), allow_pickle=True)
    with pytest.raises(WeightError, match="m-1.bin: tensor b is missing, though"):
        PickleSource(write_shards(tmp_path, shards, {"a": "m-1.bin", "b": "m-1.bin"}), allow_pickle=True)
    with pytest.raises(WeightError, match="lists 1 shard files that are not in the folder: m-9.bin"):
        PickleSource(write_shards(tmp_path, shards, {"a": "m-9.bin"}), allow_pickle=True)
