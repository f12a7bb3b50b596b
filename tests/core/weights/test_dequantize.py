"""to_float32 against the gguf package (block types) and torch (plain dtypes), bit by bit."""

import re
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from headrace.core.errors import WeightError
from headrace.core.weights import dequantize as module
from headrace.core.weights.block_types import BLOCK_TYPES
from headrace.core.weights.dequantize import row_bytes, to_float32
from headrace.core.weights.source import DTYPE_BYTES, HostTensor, numpy_dtype

READABLE = [name for name, block in BLOCK_TYPES.items() if block.dequantize]


def blocked(name: str, data: npt.NDArray[np.uint8]) -> HostTensor:
    block = BLOCK_TYPES[name]
    shape = (data.shape[0], data.shape[1] // block.num_bytes * block.num_values)
    return HostTensor(name="t", dtype=name, shape=shape, data=data, file="f.gguf")


def bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    """Bit patterns, with one pattern for every NaN: which NaN comes out of 0 * inf is the CPU's choice."""
    return np.where(np.isnan(values), np.uint32(0x7FC00000), values.view(np.uint32))


def test_table_agrees_with_the_gguf_package() -> None:
    theirs = {kind.name.lower(): kind for kind in GGMLQuantizationType}
    for name, block in BLOCK_TYPES.items():
        kind = theirs[name]
        assert block.ggml_type == kind.value
        if name != "q8_1":  # the package lists 40 bytes for it; llama.cpp's struct has 36, and no file holds it
            assert (block.num_values, block.num_bytes) == gguf.GGML_QUANT_SIZES[kind]
    plain = {"f32", "f16", "bf16", "f64", "i8", "i16", "i32", "i64"}
    assert set(BLOCK_TYPES) == set(theirs) - plain


@pytest.mark.parametrize("name", READABLE)
def test_random_bytes_dequantize_bit_exactly(name: str) -> None:
    rng = np.random.default_rng(7)
    data = rng.integers(0, 256, (37, BLOCK_TYPES[name].num_bytes * 5), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = dequantize(data, GGMLQuantizationType[name.upper()])
    got = to_float32(blocked(name, data))
    assert got.dtype == np.float32 and got.shape == expected.shape
    np.testing.assert_array_equal(bits(got), bits(expected.astype(np.float32)))


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "tq1_0", "tq2_0"])
def test_quantized_weights_dequantize_bit_exactly(name: str) -> None:
    weight = np.random.default_rng(8).standard_normal((64, 512), dtype=np.float32)
    data = quantize(weight, GGMLQuantizationType[name.upper()])
    expected = dequantize(data, GGMLQuantizationType[name.upper()])
    np.testing.assert_array_equal(bits(to_float32(blocked(name, data))), bits(expected))


def test_chunks_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.random.default_rng(9).integers(0, 60, (11, 144 * 3), dtype=np.uint8)
    whole = to_float32(blocked("q4_k", data))
    plain = HostTensor(name="t", dtype="bfloat16", shape=(7, 13), data=data.view(np.uint16).reshape(-1)[:91])
    plain_whole = to_float32(plain)
    monkeypatch.setattr(module, "_CHUNK_VALUES", 512)
    np.testing.assert_array_equal(bits(to_float32(blocked("q4_k", data))), bits(whole))
    monkeypatch.setattr(module, "_CHUNK_VALUES", 10)
    np.testing.assert_array_equal(bits(to_float32(plain)), bits(plain_whole))


@pytest.mark.parametrize("dtype", [name for name in DTYPE_BYTES if name != "bool"])
def test_plain_dtypes_agree_with_torch(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    carrier = numpy_dtype(dtype)
    rng = np.random.default_rng(10)
    raw = rng.integers(0, 256, (5, 256 * carrier.itemsize), dtype=np.uint8)
    data: npt.NDArray[Any] = raw.view(carrier)
    if dtype.startswith("float8"):
        data[0] = np.arange(256)
    with np.errstate(all="ignore"):
        got = to_float32(HostTensor(name="t", dtype=dtype, shape=data.shape, data=data))
    expected = torch.from_numpy(raw).view(getattr(torch, dtype)).to(torch.float32).numpy()
    np.testing.assert_array_equal(bits(got), bits(expected))


def test_bool_and_scalar() -> None:
    flags = HostTensor(name="t", dtype="bool", shape=(2,), data=np.array([True, False]))
    assert to_float32(flags).tolist() == [1.0, 0.0]
    scalar = HostTensor(name="t", dtype="float16", shape=(), data=np.array(1.5, dtype=np.float16))
    assert to_float32(scalar).shape == () and to_float32(scalar) == 1.5
    empty = HostTensor(name="t", dtype="int64", shape=(0, 4), data=np.empty((0, 4), dtype=np.int64))
    assert to_float32(empty).shape == (0, 4)


def test_float32_is_not_copied() -> None:
    data = np.ones((3, 2), dtype=np.float32)
    assert np.shares_memory(to_float32(HostTensor(name="t", dtype="float32", shape=(3, 2), data=data)), data)


def test_leading_dimensions_are_kept() -> None:
    data = np.random.default_rng(11).integers(0, 60, (6, 34), dtype=np.uint8)
    tensor = HostTensor(name="t", dtype="q8_0", shape=(2, 3, 32), data=data)
    expected = dequantize(data, GGMLQuantizationType.Q8_0).reshape(2, 3, 32)
    np.testing.assert_array_equal(to_float32(tensor), expected)


@pytest.mark.parametrize("name", ["iq2_xs", "iq1_s", "q8_k", "no_such_type"])
def test_unreadable_block_type_names_file_tensor_and_type(name: str) -> None:
    tensor = HostTensor(name="blk.0.w", dtype=name, shape=(1, 256), data=np.zeros((1, 8), np.uint8), file="a.gguf")
    with pytest.raises(WeightError, match=f"a.gguf: tensor blk.0.w has block type {name}.*q4_k") as caught:
        to_float32(tensor)
    assert (caught.value.file, caught.value.tensor) == ("a.gguf", "blk.0.w")


def test_row_bytes() -> None:
    assert row_bytes("bfloat16", 10) == 20
    assert row_bytes("q4_k", 512) == 288
    with pytest.raises(ValueError, match="100 values is not a whole number of q4_0 blocks of 32"):
        row_bytes("q4_0", 100)
    with pytest.raises(ValueError, match="unknown dtype 'q9'"):
        row_bytes("q9", 32)


def test_temporaries_stay_small() -> None:
    data = np.zeros((2048, 144 * 8), dtype=np.uint8)
    tracemalloc.start()
    out = to_float32(blocked("q4_k", data))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < out.nbytes + 4 * 2**20


def test_the_documented_table_is_the_table() -> None:
    page = Path(__file__).parents[3] / "docs" / "weights.md"
    rows = re.findall(r"^\| (\w+) \| (\d+) \| (\d+) \| ([\d.]+) \| (yes|no) \|$", page.read_text(), re.MULTILINE)
    assert [row[0] for row in rows] == list(BLOCK_TYPES)
    for name, num_values, num_bytes, bits_per_value, readable in rows:
        block = BLOCK_TYPES[name]
        assert (int(num_values), int(num_bytes)) == (block.num_values, block.num_bytes)
        assert float(bits_per_value) == pytest.approx(8 * block.num_bytes / block.num_values, rel=1e-3)
        assert (readable == "yes") == (block.dequantize is not None)
