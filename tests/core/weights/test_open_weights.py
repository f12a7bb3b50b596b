"""open_weights: which reader a folder or file gets, and what is said when there is nothing to read."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from safetensors.numpy import save_file

from headrace.core.errors import ModelNotFound, WeightError
from headrace.core.weights.gguf import GGUFSource
from headrace.core.weights.open import open_weights
from headrace.core.weights.safetensors import SafetensorsSource

ONE = {"w": np.ones(2, dtype=np.float32)}


def write_gguf(path: Path) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("w", ONE["w"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ["model.safetensors", "other.safetensors"])
def test_folder_and_file_of_safetensors(tmp_path: Path, name: str) -> None:
    save_file(ONE, tmp_path / name)
    (tmp_path / "pytorch_model.bin").write_bytes(b"never looked at")
    for path in (tmp_path / name, tmp_path) if name == "model.safetensors" else (tmp_path / name,):
        source = open_weights(path)
        assert isinstance(source, SafetensorsSource) and list(source.names()) == ["w"]


def test_the_only_safetensors_file_of_a_folder_is_taken(tmp_path: Path) -> None:
    save_file(ONE, tmp_path / "other.safetensors")
    assert list(open_weights(tmp_path).names()) == ["w"]
    save_file(ONE, tmp_path / "another.safetensors")
    with pytest.raises(WeightError, match=r"holds 2 .safetensors files \(another.safetensors, other.safetensors\)"):
        open_weights(tmp_path)


def test_gguf_by_name_and_by_content(tmp_path: Path) -> None:
    for name in ("m.gguf", "sha256-0123"):
        source = open_weights(write_gguf(tmp_path / name))
        assert isinstance(source, GGUFSource) and list(source.names()) == ["w"]


def test_pickle_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"whatever")
    with pytest.raises(WeightError, match="pytorch_model.bin is a pickle file; a pickle can run any code"):
        open_weights(tmp_path)
    (tmp_path / "w.pt").write_bytes(b"whatever")
    with pytest.raises(WeightError, match="w.pt is a pickle file"):
        open_weights(tmp_path / "w.pt")


def test_no_such_path(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="there is no file or folder .*nowhere"):
        open_weights(tmp_path / "nowhere")


def test_a_folder_without_weights_lists_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"holds no weights; looked for model.safetensors, .*\.bin"):
        open_weights(tmp_path)
    write_gguf(tmp_path / "m.gguf")
    with pytest.raises(WeightError, match="holds GGUF files, which are passed by name: m.gguf") as caught:
        open_weights(tmp_path)
    assert caught.value.remedies == (str(tmp_path / "m.gguf"),)


def test_an_unknown_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.h5").write_bytes(b"HDF5")
    with pytest.raises(WeightError, match=r"weights.h5 is of no known weight format; known endings: .gguf"):
        open_weights(tmp_path / "weights.h5")


def test_one_file_is_preferred_to_a_stale_index(tmp_path: Path) -> None:
    save_file(ONE, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"w": "model-00001-of-00002.safetensors"}}'
    )
    assert list(open_weights(tmp_path).names()) == ["w"]
