"""The safetensors reader against the safetensors package: what it reads, and what it refuses."""

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file
from safetensors.torch import save_file as save_torch

from headrace.core.errors import WeightError
from headrace.core.weights.dequantize import to_float32
from headrace.core.weights.safetensors import SafetensorsSource

TENSORS: dict[str, npt.NDArray[Any]] = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b.weight": np.arange(6, dtype=np.float16).reshape(2, 3),
    "c": np.array([1, -2, 3], dtype=np.int64),
    "scalar": np.array(2.5, dtype=np.float64),
    "empty": np.empty((0, 4), dtype=np.float32),
    "flags": np.array([True, False, True]),
}


def encode(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write(folder: Path, content: bytes, name: str = "m.safetensors") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def write_shards(folder: Path, shards: dict[str, dict[str, npt.NDArray[Any]]], weight_map: object) -> Path:
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    return write(folder, json.dumps({"weight_map": weight_map}).encode(), "model.safetensors.index.json")


def test_reads_what_the_package_wrote(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    source = SafetensorsSource(path)
    assert set(source.names()) == set(TENSORS)
    for name, expected in TENSORS.items():
        info, tensor = source.info(name), source.read(name)
        assert (info.dtype, info.shape, info.num_bytes) == (expected.dtype.name, expected.shape, expected.nbytes)
        assert (tensor.dtype, tensor.shape, tensor.file) == (info.dtype, info.shape, str(path))
        np.testing.assert_array_equal(tensor.data, expected)
    source.close()
    source.close()


def test_names_follow_the_file(tmp_path: Path) -> None:
    data = {name: np.zeros(4, dtype=np.float32) for name in "zyxabc"}
    path = write(tmp_path, save(data))
    length = struct.unpack("<Q", path.read_bytes()[:8])[0]
    header = json.loads(path.read_bytes()[8 : 8 + length])
    assert list(SafetensorsSource(path).names()) == sorted(header, key=lambda name: header[name]["data_offsets"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_dtypes_that_numpy_lacks_come_as_bits(tmp_path: Path, dtype: str) -> None:
    bits = torch.arange(32, dtype=torch.uint8)
    save_torch({"w": bits.view(getattr(torch, dtype)).reshape(2, -1)}, tmp_path / "m.safetensors")
    tensor = SafetensorsSource(tmp_path / "m.safetensors").read("w")
    assert tensor.dtype == dtype and tensor.data.dtype == (np.uint16 if dtype == "bfloat16" else np.uint8)
    assert tensor.data.tobytes() == bytes(range(32))


def test_tensors_are_views_that_outlive_close(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"w": np.ones((1024, 1024), dtype=np.float32)}, path)
    tracemalloc.start()
    source = SafetensorsSource(path)
    data = source.read("w").data
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20
    assert not data.flags.writeable
    source.close()
    assert data.sum() == 2**20
    with pytest.raises(AssertionError, match="has been closed"):
        source.read("w")


def test_files_of_gigabytes_are_read(tmp_path: Path) -> None:
    half = 1 << 30
    header = {"a": entry("U8", [half], 0, half), "b": entry("U8", [half], half, 2 * half)}
    path = write(tmp_path, encode(header))
    with path.open("ab") as file:
        file.truncate(path.stat().st_size + 2 * half)  # a hole, which takes no room
    source = SafetensorsSource(path)
    assert source.info("b").num_bytes == half
    source.close()


def test_unaligned_data_is_read(tmp_path: Path) -> None:
    header = json.dumps({"w": entry("F32", [2], 0, 8)}).encode()
    header += b" " * (3 - len(header) % 4)
    path = write(tmp_path, encode(header, np.array([1.5, -2], dtype=np.float32).tobytes()))
    data = SafetensorsSource(path).read("w").data
    assert data.flags.aligned and data.tolist() == [1.5, -2]


TWO = {"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 8, 16)}


@pytest.mark.parametrize(
    ("content", "tensor", "message"),
    [
        (b"", "", "is empty"),
        (b"\x01\x02", "", "is truncated: 2 bytes cannot hold"),
        (b"version https://git-lfs...\noid sha256:1\n", "", "is a Git LFS pointer"),
        (b"<!DOCTYPE html><html>", "", "is not a safetensors file"),
        (encode(TWO, bytes(16))[:40], "", "is truncated: the header takes"),
        (encode(TWO, bytes(15)), "b", "is truncated: its data ends at byte 16, the file has 15"),
        (encode(TWO, bytes(20)), "", "has 4 bytes after the last tensor"),
        (encode(b"{]"), "", "has a damaged header"),
        (encode(b'{"\xff": 1}'), "", "has a damaged header"),
        (encode(b"[" * 100_000), "", "nested too deeply"),
        (encode([1]), "", "it is not a JSON object"),
        (encode({"a": 3}), "a", "not an object"),
        (encode({"a": entry("F4", [2], 0, 1)}, bytes(1)), "a", "has dtype 'F4'; readable: F64"),
        (encode({"a": entry("F32", [-1], 0, 4)}, bytes(4)), "a", r"has the impossible shape \[-1\]"),
        (encode({"a": entry("F32", [1.0], 0, 4)}, bytes(4)), "a", "has the impossible shape"),  # type: ignore[list-item]
        (encode({"a": entry("F32", [True], 0, 4)}, bytes(4)), "a", "has the impossible shape"),
        (encode({"a": entry("F32", [1] * 99, 0, 4)}, bytes(4)), "a", "has the impossible shape"),
        (encode({"a": entry("F32", [0, 2**62, 9], 0, 0)}), "a", "has the impossible shape"),
        (encode({"a": entry("F32", [2], 8, 0)}, bytes(8)), "a", "has the impossible data_offsets"),
        (encode({"a": entry("F32", [3], 0, 8)}, bytes(8)), "a", "takes 12 bytes, its data_offsets span 8"),
        (encode(TWO | {"b": entry("F32", [2], 4, 12)}, bytes(12)), "b", "overlaps the tensor before it"),
        (encode(TWO | {"b": entry("F32", [2], 12, 20)}, bytes(20)), "b", "follows bytes of no tensor"),
        (encode(b'{"a": 1, "a": 2}'), "a", "is a duplicate: the header has it twice"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, content: bytes, tensor: str, message: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(WeightError, match=message) as caught:
        SafetensorsSource(path)
    assert caught.value.file == str(path) and str(path) in caught.value.reason
    assert caught.value.tensor == tensor and tensor in caught.value.reason


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    a, b = np.ones(3, dtype=np.float32), np.zeros((2, 2), dtype=np.float16)
    shards: dict[str, dict[str, npt.NDArray[Any]]] = {"m-1.safetensors": {"a": a}, "m-2.safetensors": {"b": b}}
    index = write_shards(tmp_path, shards, {"b": "m-2.safetensors", "a": "m-1.safetensors"})
    source = SafetensorsSource(index)
    assert list(source.names()) == ["a", "b"]
    np.testing.assert_array_equal(source.read("b").data, b)
    assert source.info("b").file == str(tmp_path / "m-2.safetensors")


ONE: npt.NDArray[Any] = np.ones(1, dtype=np.float32)


@pytest.mark.parametrize(
    ("weight_map", "tensor", "message"),
    [
        (
            {"a": "m-1.safetensors", "c": "m-3.safetensors"},
            "c",
            "lists 1 shard files that are not in the folder: m-3",
        ),
        ({"a": "m-1.safetensors", "z": "m-1.safetensors"}, "z", "m-1.safetensors: tensor z is missing"),
        ({"a": "m-1.safetensors", "b": "m-1.safetensors"}, "b", "m-1.safetensors: tensor b is missing"),
        ({"a": "m-1.safetensors", "b": "m-3.safetensors"}, "b", "not in the folder"),
        ({"a": "../m-1.safetensors"}, "a", "which is not a file of this folder"),
        ({"a": "/m-1.safetensors"}, "a", "which is not a file of this folder"),
        ({"a": 7}, "a", "puts tensor a into 7"),
        ({}, "", "has no weight_map"),
        ([], "", "has no weight_map"),
    ],
)
def test_contradictory_indexes_are_refused(tmp_path: Path, weight_map: object, tensor: str, message: str) -> None:
    index = write_shards(tmp_path, {"m-1.safetensors": {"a": ONE}, "m-2.safetensors": {"b": ONE}}, weight_map)
    with pytest.raises(WeightError, match=message) as caught:
        SafetensorsSource(index)
    assert caught.value.tensor == tensor and caught.value.file


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    shards = {"m-1.safetensors": {"a": ONE}, "m-2.safetensors": {"a": ONE, "b": ONE}}
    index = write_shards(tmp_path, shards, {"a": "m-1.safetensors", "b": "m-2.safetensors"})
    with pytest.raises(WeightError, match="m-2.safetensors: tensor a is a duplicate: m-1.safetensors has it too"):
        SafetensorsSource(index)


def test_an_index_that_is_not_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"index\.json: is not valid JSON"):
        SafetensorsSource(write(tmp_path, b"{", "model.safetensors.index.json"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="none.safetensors: cannot be opened: No such file"):
        SafetensorsSource(tmp_path / "none.safetensors")


def read_all(path: Path) -> None:
    """Whatever the bytes are: a valid read or a WeightError, without big allocations."""
    tracemalloc.start()
    try:
        source = SafetensorsSource(path)
        for name in source.names():
            to_float32(source.read(name))
        source.close()
    except WeightError as error:
        assert str(path) in error.reason
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 8 * 2**20


VALID = save(TENSORS)


@settings(max_examples=300)
@given(
    flips=st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), max_size=4),
    cut=st.one_of(st.none(), st.integers(0, len(VALID))),
    tail=st.binary(max_size=3),
)
def test_fuzzed_bytes(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]], cut: int | None, tail: bytes
) -> None:
    content = bytearray(VALID)
    for position, value in flips:
        content[position] = value
    read_all(write(tmp_path_factory.mktemp("fuzz"), bytes(content[:cut]) + tail))


SIZES = st.one_of(st.integers(-1, 5), st.sampled_from([2**31, 2**62, 2**63, 2**64, 10**40]), st.none(), st.booleans())
FIELDS = st.one_of(
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "BF16", "BOOL", "X", 3]),
            "shape": st.one_of(st.lists(SIZES, max_size=9), SIZES),
            "data_offsets": st.one_of(st.lists(SIZES, min_size=1, max_size=3), SIZES),
        }
    ),
    st.none(),
    st.lists(st.integers(), max_size=2),
)


@settings(max_examples=300)
@given(header=st.dictionaries(st.text(max_size=3), FIELDS, max_size=3), data=st.binary(max_size=24))
def test_fuzzed_headers(tmp_path_factory: pytest.TempPathFactory, header: dict[str, Any], data: bytes) -> None:
    read_all(write(tmp_path_factory.mktemp("fuzz"), encode(header, data)))
