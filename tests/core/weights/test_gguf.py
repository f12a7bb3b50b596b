"""The GGUF reader against the gguf package's writer and reader: what it reads, and what it refuses."""

import struct
import time
import tracemalloc
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, GGUFEndian, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import WeightError
from headrace.core.weights.dequantize import to_float32
from headrace.core.weights.gguf import GGUFSource

WEIGHT = np.random.default_rng(3).standard_normal((6, 64), dtype=np.float32)
VECTOR = np.arange(5, dtype=np.float32)
METADATA: dict[str, tuple[Any, GGUFValueType, GGUFValueType | None]] = {
    "t.uint8": (200, GGUFValueType.UINT8, None),
    "t.int8": (-3, GGUFValueType.INT8, None),
    "t.uint16": (60000, GGUFValueType.UINT16, None),
    "t.int16": (-300, GGUFValueType.INT16, None),
    "t.uint32": (4_000_000_000, GGUFValueType.UINT32, None),
    "t.int32": (-70000, GGUFValueType.INT32, None),
    "t.float32": (0.25, GGUFValueType.FLOAT32, None),
    "t.uint64": (2**63, GGUFValueType.UINT64, None),
    "t.int64": (-(2**62), GGUFValueType.INT64, None),
    "t.float64": (1e-300, GGUFValueType.FLOAT64, None),
    "t.bool": (True, GGUFValueType.BOOL, None),
    "t.string": ("h\u00e9llo \u4e16\u754c", GGUFValueType.STRING, None),
    "t.ints": ([1, 2, 3], GGUFValueType.ARRAY, GGUFValueType.INT32),
    "t.floats": ([0.5, -2.0], GGUFValueType.ARRAY, GGUFValueType.FLOAT32),
    "t.bools": ([True, False], GGUFValueType.ARRAY, GGUFValueType.BOOL),
    "t.strings": (["a", "", "\u0120b"], GGUFValueType.ARRAY, GGUFValueType.STRING),
}


def write_gguf(path: Path, tensors: dict[str, npt.NDArray[Any]], **writer_options: Any) -> Path:
    writer = GGUFWriter(path, "llama", **writer_options)
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    finish(writer)
    return path


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_rich(path: Path, alignment: int | None = None) -> Path:
    """A file with every kind of metadata and several tensor types."""
    writer = GGUFWriter(path, "llama")
    for key, (value, kind, item) in METADATA.items():
        writer.add_key_value(key, value, kind, item)
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_tensor("w", WEIGHT)
    writer.add_tensor("half", WEIGHT.astype(np.float16))
    writer.add_tensor("ids", np.arange(7, dtype=np.int32))
    for dtype in (GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0, GGMLQuantizationType.BF16):
        writer.add_tensor(dtype.name.lower(), quantize(WEIGHT, dtype), raw_dtype=dtype)
    writer.add_tensor("v", VECTOR)
    finish(writer)
    return path


@pytest.mark.parametrize("alignment", [None, 8, 256])
def test_reads_what_the_package_wrote(tmp_path: Path, alignment: int | None) -> None:
    path = write_rich(tmp_path / "m.gguf", alignment)
    source = GGUFSource(path)
    assert source.metadata["general.architecture"] == "llama"
    for key, (expected, _, _) in METADATA.items():
        assert source.metadata[key] == expected and type(source.metadata[key]) is type(expected)
    theirs = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    assert list(source.names()) == sorted(theirs, key=lambda name: int(theirs[name].data_offset))
    for name, tensor in theirs.items():
        info, ours = source.info(name), source.read(name)
        assert info.shape == tuple(int(size) for size in tensor.shape)[::-1]
        assert info.num_bytes == tensor.n_bytes and info.file == str(path)
        assert ours.data.tobytes() == tensor.data.tobytes()
        assert not ours.data.flags.writeable
    np.testing.assert_array_equal(to_float32(source.read("w")), WEIGHT)
    np.testing.assert_array_equal(to_float32(source.read("half")), WEIGHT.astype(np.float16).astype(np.float32))
    assert source.read("q4_1").data.shape == (6, 2 * 20) and source.read("q4_1").is_blocked
    assert source.info("bf16").dtype == "bfloat16"
    source.close()
    source.close()


TEXTS = st.text(alphabet="\0\x07a\u0120\U0001f600", max_size=40) | st.integers(0, 300).map("x".__mul__)


@settings(max_examples=200)
@given(texts=st.lists(TEXTS, min_size=1, max_size=8), follows=st.integers(0, 2**32 - 1))
def test_strings_of_any_length_and_with_zeros_are_kept(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], follows: int
) -> None:
    path = tmp_path_factory.mktemp("texts") / "m.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_array("texts", texts)
    writer.add_uint32("follows", follows)
    finish(writer)
    with closing(GGUFSource(path)) as source:
        assert source.metadata["texts"] == texts and source.metadata["follows"] == follows


def test_a_vocabulary_reads_fast(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    tokens = [f"\u0120token{number}" for number in range(50_000)]
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", [1] * len(tokens))
    finish(writer)
    times = []
    for _ in range(5):
        start = time.process_time()
        GGUFSource(tmp_path / "m.gguf").close()
        times.append(time.process_time() - start)
    assert GGUFSource(tmp_path / "m.gguf").metadata["tokenizer.ggml.tokens"] == tokens
    assert min(times) < 0.15


def test_nested_arrays_have_a_limit(tmp_path: Path) -> None:
    def nested(depth: int) -> bytes:
        inner = struct.pack("<IQB", 0, 1, 7)
        for _ in range(depth):
            inner = struct.pack("<IQ", 9, 1) + inner
        return b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 9) + inner

    path = tmp_path / "m.gguf"
    path.write_bytes(nested(2))
    assert GGUFSource(path).metadata == {"k": [[[7]]]}
    path.write_bytes(nested(5000))
    with pytest.raises(WeightError, match="unknown value type 9 in metadata key k"):
        GGUFSource(path)


def test_split_files_are_read_as_one(tmp_path: Path) -> None:
    tensors: dict[str, npt.NDArray[Any]] = {f"t{number}": WEIGHT + np.float32(number) for number in range(5)}
    write_gguf(tmp_path / "m.gguf", tensors, split_max_tensors=2)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert [part.name for part in parts] == [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for part in parts:
        source = GGUFSource(part)
        assert list(source.names()) == list(tensors)
        assert source.metadata["general.architecture"] == "llama"
        for name, expected in tensors.items():
            np.testing.assert_array_equal(source.read(name).data, expected)
        assert source.info("t4").file == str(parts[2])
    content = parts[1].read_bytes()
    parts[1].unlink()
    with pytest.raises(WeightError, match="of the 3 files of this split model, 1 are missing: m-00002-of-00003.gguf"):
        GGUFSource(parts[0])
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(WeightError, match=r"m-00002-of-00003.gguf: is part 2 \(from 0\) of 3, expected part 1 of 3"):
        GGUFSource(parts[0])
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(content)
    with pytest.raises(WeightError, match=r"is part 1 \(from 0\) of 3, expected part 0 of 1"):
        GGUFSource(renamed)


def test_a_set_with_too_few_tensors_is_refused(tmp_path: Path) -> None:
    tensors: dict[str, npt.NDArray[Any]] = {f"t{number}": VECTOR for number in range(4)}
    write_gguf(tmp_path / "m.gguf", tensors, split_max_tensors=2)
    write_gguf(tmp_path / "n.gguf", {"a": VECTOR, "b": VECTOR, "c": VECTOR}, split_max_tensors=2)
    (tmp_path / "n-00002-of-00002.gguf").replace(tmp_path / "m-00002-of-00002.gguf")
    with pytest.raises(WeightError, match="hold 3 tensors, its first one promises 4"):
        GGUFSource(tmp_path / "m-00001-of-00002.gguf")


def header(*tensors: tuple[str, tuple[int, ...], int, int], keys: bytes = b"", num_keys: int = 0) -> bytes:
    """A GGUF header by hand: (name, dims as stored, type, offset)."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), num_keys) + keys
    for name, dims, kind, offset in tensors:
        out += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(dims))
        out += struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)
    return out + bytes(-len(out) % 32)


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


U32 = struct.Struct("<I").pack


@pytest.mark.parametrize(
    ("content", "tensor", "message"),
    [
        (b"", "", "is empty"),
        (b"GG", "", "is not a GGUF file"),
        (b"PK\x03\x04" + bytes(40), "", "is not a GGUF file"),
        (b"GGUF" + U32(3), "", "is truncated or damaged in the header: a number would take 8 bytes, 0 are left"),
        (b"GGUF" + U32(1) + bytes(64), "", "has GGUF version 1; versions 2 and 3 are read"),
        (b"GGUF" + U32(9) + bytes(64), "", "has GGUF version 9"),
        (b"GGUF" + bytes([0, 0, 0, 3]) + bytes(64), "", "is a big-endian GGUF file"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0),
            "",
            "1152921504606846976 tensors and 0 metadata keys would take",
        ),
        (header(keys=key(b"k", 8, struct.pack("<Q", 2**63)), num_keys=1), "", "damaged in metadata key k: a string"),
        (header(keys=key(b"k", 9, struct.pack("<IQ", 8, 2**20)), num_keys=1), "", "key k: an array of 1048576"),
        (header(keys=key(b"k", 9, struct.pack("<IQ", 0, 2**40)), num_keys=1), "", "has an array of 1099511627776"),
        (header(keys=key(b"k", 77, b""), num_keys=1), "", "has the unknown value type 77 in metadata key k"),
        (header(keys=key(b"\xff", 0, b"1"), num_keys=1), "", "has text that is not UTF-8 in a metadata key"),
        (header(keys=key(b"k", 0, b"1") * 2, num_keys=2), "", "has the metadata key k twice"),
        (header(keys=key(b"general.alignment", 4, U32(24)), num_keys=1), "", "has general.alignment 24"),
        (header(keys=key(b"general.alignment", 7, b"\x01"), num_keys=1), "", "has general.alignment True"),
        (header(("a", (4,), 0, 0)) + bytes(15), "a", "is truncated: its data ends at byte 16, the file has 15"),
        (header(("a", (4,), 0, 64)) + bytes(64), "a", "is truncated: its data ends at byte 80, the file has 64"),
        (
            header(("a", (4,), 0, 3)) + bytes(64),
            "a",
            "begins at offset 3, which is not a multiple of the alignment 32",
        ),
        (header(("a", (9,), 0, 0), ("b", (1,), 0, 32)) + bytes(64), "b", "overlaps tensor a"),
        (header(("a", (1,), 0, 0), ("a", (1,), 0, 32)) + bytes(64), "a", "is a duplicate: this file has it too"),
        (header(("a", (1,), 31, 0)) + bytes(64), "a", "has type number 31, which is unknown here"),
        (header(("a", (33, 2), 2, 0)) + bytes(64), "a", r"has shape \[2, 33\]: a row of 33 values is not a whole"),
        (header(("a", (), 8, 0)) + bytes(64), "a", "a row of 1 values is not a whole number of q8_0 blocks"),
        (header(("a", (1,) * 5, 0, 0)) + bytes(64), "a", "has 5 dimensions, at most 4"),
        (header(("a", (2**40, 2**40), 0, 0)) + bytes(64), "a", "has the impossible shape"),
        (header(("a" * 2000, (1,), 0, 0)) + bytes(64), "", "has a name of 2000 characters"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, content: bytes, tensor: str, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(WeightError, match=message) as caught:
        GGUFSource(path)
    assert caught.value.file == str(path) and str(path) in caught.value.reason
    assert caught.value.tensor == tensor and tensor in caught.value.reason


def test_a_big_endian_file_of_the_package_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"v": VECTOR}, endianess=GGUFEndian.BIG)
    with pytest.raises(WeightError, match="is a big-endian GGUF file"):
        GGUFSource(path)


def test_version_2_is_read(tmp_path: Path) -> None:
    path = write_rich(tmp_path / "m.gguf")
    content = bytearray(path.read_bytes())
    content[4] = 2
    path.write_bytes(content)
    np.testing.assert_array_equal(GGUFSource(path).read("w").data, WEIGHT)


def test_scalar_and_empty_tensors_are_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header(("s", (), 0, 0), ("e", (32, 0), 8, 32)) + struct.pack("<f", 2.5) + bytes(28))
    source = GGUFSource(path)
    assert to_float32(source.read("s")).shape == () and source.read("s").data == np.float32(2.5)
    assert to_float32(source.read("e")).shape == (0, 32)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_rich(tmp_path_factory.mktemp("valid") / "m.gguf").read_bytes()


def read_all(path: Path) -> None:
    """Whatever the bytes are: a valid read or a WeightError, without big allocations."""
    tracemalloc.start()
    try:
        source = GGUFSource(path)
        for name in source.names():
            to_float32(source.read(name))
        source.close()
    except WeightError as error:
        assert str(path) in error.reason
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 8 * 2**20


WORDS = st.one_of(st.integers(0, 300), st.sampled_from([2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]))


@settings(max_examples=300)
@given(
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4),
    words=st.lists(st.tuples(st.floats(0, 0.4), WORDS), max_size=2),
    cut=st.one_of(st.none(), st.floats(0, 1)),
)
def test_fuzzed_bytes(
    tmp_path_factory: pytest.TempPathFactory,
    valid: bytes,
    flips: list[tuple[float, int]],
    words: list[tuple[float, int]],
    cut: float | None,
) -> None:
    content = bytearray(valid)
    for place, value in flips:
        content[int(place * len(valid))] = value
    for place, word in words:
        position = int(place * len(valid))
        content[position : position + 8] = struct.pack("<Q", word)
    path = tmp_path_factory.mktemp("fuzz") / "m.gguf"
    path.write_bytes(content if cut is None else content[: int(cut * len(content))])
    read_all(path)


DIMS = st.lists(WORDS, max_size=5).map(tuple)
ENTRIES = st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), DIMS, st.integers(0, 45), WORDS), max_size=3)


@settings(max_examples=300)
@given(entries=ENTRIES, size=st.integers(0, 400))
def test_fuzzed_tensor_index(
    tmp_path_factory: pytest.TempPathFactory, entries: list[tuple[str, tuple[int, ...], int, int]], size: int
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "m.gguf"
    path.write_bytes(header(*entries) + bytes(size))
    read_all(path)
