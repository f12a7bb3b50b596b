"""Reads GGUF version 2 and 3, one file or a split set: metadata, tensor index, and tensors as views of a mapping.

magic "GGUF" | uint32 version | uint64 number of tensors | uint64 number of keys
keys:    string key | uint32 type | value
tensors: string name | uint32 number of dimensions | uint64 sizes, fastest first | uint32 type | uint64 offset
data, aligned to general.alignment; offsets count from here
string:  uint64 length | UTF-8.   array: uint32 type | uint64 length | values.   All little-endian.
"""

import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import WeightError
from ..model_file import has_file
from .block_types import BLOCK_TYPES
from .dequantize import row_bytes
from .mapped_file import MappedFile
from .source import DTYPE_BYTES, HostTensor, TensorInfo, numpy_dtype

_PLAIN_TYPES = {
    0: "float32", 1: "float16", 24: "int8", 25: "int16", 26: "int32", 27: "int64", 28: "float64", 30: "bfloat16",
}  # fmt: skip
_TENSOR_TYPES = _PLAIN_TYPES | {block.ggml_type: name for name, block in BLOCK_TYPES.items()}
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAX_NESTING = 4
_MAX_ARRAY = 1 << 24
"""Values of a metadata array; vocabularies have under a million, and a list takes many times the file's bytes."""
_SHORT_WINDOW_BYTES = 32
"""For a string of a vocabulary and its length, on average; most take half of it."""
_MAX_DIMS = 4
_MAX_NAME_BYTES = 1024
_DEFAULT_ALIGNMENT = 32
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_REMEDIES = ("download the file again",)


@dataclass(frozen=True, slots=True)
class _Entry:
    info: TensorInfo
    file: MappedFile
    begin: int
    """first byte of the data, counted from the start of the file"""


class GGUFSource:
    """A WeightSource over one .gguf file, or over all files of a split set given any of them.

    Shapes are ours: [out_features, in_features], the reverse of the file's order. Everything that the index says
    is checked at once; data is read by `read`, as read-only views.
    """

    def __init__(self, path: Path) -> None:
        """Raises WeightError that names the damaged or missing file and tensor."""
        self._files: list[MappedFile] = []
        self._entries: dict[str, _Entry] = {}
        self._metadata: dict[str, Any] = {}
        try:
            parts = _split_parts(path)
            for number, part in enumerate(parts):
                self._add_file(part, number, len(parts))
            self._check_split(path, len(parts))
        except WeightError:
            self.close()
            raise

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Key -> int, float, bool, str, or a list of them; of a split set, those of its first file."""
        return self._metadata

    def names(self) -> Sequence[str]:
        """Names in the order of their data, file by file."""
        return tuple(self._entries)

    def info(self, name: str) -> TensorInfo:
        """Index entry of one tensor. KeyError if there is none."""
        return self._entries[name].info

    def read(self, name: str) -> HostTensor:
        """One tensor, a read-only view of the mapping (a copy if the file does not align it)."""
        entry = self._entries[name]
        info = entry.info
        data: Any = entry.file.view(entry.begin, info.num_bytes)
        if info.dtype in DTYPE_BYTES:
            data = data.view(numpy_dtype(info.dtype)).reshape(info.shape)
            if not data.flags.aligned:
                data = data.copy()
        else:
            data = data.reshape(math.prod(info.shape[:-1]), row_bytes(info.dtype, info.shape[-1]))
        return HostTensor(name=name, dtype=info.dtype, shape=info.shape, data=data, file=info.file)

    def close(self) -> None:
        """Close all files."""
        for file in self._files:
            file.close()

    def _add_file(self, path: Path, number: int, count: int) -> None:
        file = MappedFile(path)
        self._files.append(file)
        metadata, entries = _Reader(file).read()
        stated = (metadata.get("split.no", 0), metadata.get("split.count", 0) or 1)
        if stated != (number, count):
            raise file.error(
                f"is part {stated[0]} (from 0) of {stated[1]}, expected part {number} of {count}",
                remedies=("keep the names that end in -00001-of-0000N.gguf, all files in one folder",),
            )
        for entry in entries:
            other = self._entries.get(entry.info.name)
            if other is not None:
                where = "this file" if other.file is file else other.file.path.name
                raise file.error(f"is a duplicate: {where} has it too", tensor=entry.info.name)
            self._entries[entry.info.name] = entry
        if number == 0:
            self._metadata = metadata

    def _check_split(self, path: Path, count: int) -> None:
        stated = self._metadata.get("split.tensors.count")
        if count > 1 and stated is not None and stated != len(self._entries):
            raise WeightError(
                f"{path}: the {count} files of this set hold {len(self._entries)} tensors, its first one promises "
                f"{stated}; some are missing or from another set",
                file=str(path),
                remedies=("download all files of the set again",),
            )


def _split_parts(path: Path) -> list[Path]:
    """All files of the set that `path` belongs to by its name. Raises WeightError if some are missing."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    parts = [path.with_name(f"{match['stem']}-{number + 1:05}-of-{count:05}.gguf") for number in range(count)]
    if path not in parts:
        return [path]
    missing = [part.name for part in parts if not has_file(part)]
    if missing:
        listed = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise WeightError(
            f"{path}: of the {count} files of this split model, {len(missing)} are missing: {listed}",
            file=str(path),
            remedies=("download all files of the set into one folder",),
        )
    return parts


class _Reader:
    """Walks one file's header. Invariant: `position` never passes the end of the file."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.view = file.bytes.data
        self.position = 0
        self.place = "the header"
        """what is being read, for errors"""

    def read(self) -> tuple[dict[str, Any], list[_Entry]]:
        """The file's metadata, and its tensors in the order of their data."""
        num_tensors, num_keys = self.preamble()
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            self.place = "a metadata key"
            key = self.string()
            if key in metadata:
                raise self.file.error(f"has the metadata key {key} twice", remedies=_REMEDIES)
            self.place = f"metadata key {key}"
            metadata[key] = self.value(self.scalar("I"))
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 30:
            raise self.file.error(f"has general.alignment {alignment!r}, which is not a power of two")
        indexed = [self.tensor(number) for number in range(num_tensors)]
        data_start = -(-self.position // alignment) * alignment
        entries = [self.entry(info, data_start, offset, alignment) for info, offset in indexed]
        entries.sort(key=lambda entry: (entry.begin, entry.info.num_bytes))
        for before, entry in zip(entries, entries[1:], strict=False):
            if before.info.name != entry.info.name and before.begin + before.info.num_bytes > entry.begin:
                raise self.file.error(
                    f"overlaps tensor {before.info.name}", tensor=entry.info.name, remedies=_REMEDIES
                )
        return metadata, entries

    def preamble(self) -> tuple[int, int]:
        """Number of tensors and of metadata keys; refuses what is not GGUF 2 or 3, little-endian."""
        if bytes(self.view[:4]) != b"GGUF":
            raise self.file.error("is not a GGUF file: it does not begin with GGUF", remedies=_REMEDIES)
        self.position = 4
        version = self.scalar("I")
        if version & 0xFFFF == 0 and version:
            raise self.file.error(
                "is a big-endian GGUF file; only little-endian ones are read",
                remedies=("convert it with gguf-convert-endian of the gguf package",),
            )
        if version not in (2, 3):
            raise self.file.error(
                f"has GGUF version {version}; versions 2 and 3 are read",
                remedies=("convert the model again with a current llama.cpp",),
            )
        num_tensors, num_keys = self.scalar("Q"), self.scalar("Q")
        # The shortest tensor entry takes 24 bytes, the shortest key 13: what cannot fit is refused before looping.
        self.need(24 * num_tensors + 13 * num_keys, f"{num_tensors} tensors and {num_keys} metadata keys")
        return num_tensors, num_keys

    def need(self, num_bytes: int, what: str) -> None:
        """Raise WeightError unless `num_bytes` are left."""
        left = len(self.view) - self.position
        if num_bytes > left:
            raise self.file.error(
                f"is truncated or damaged in {self.place}: {what} would take {num_bytes} bytes, {left} are left",
                remedies=_REMEDIES,
            )

    def scalar(self, code: str) -> Any:
        """One number or bool by its struct code."""
        size = struct.calcsize("<" + code)
        self.need(size, "a number")
        (value,) = struct.unpack_from("<" + code, self.view, self.position)
        self.position += size
        return value

    def string(self) -> str:
        """One string."""
        return self.any_strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """`count` strings. A vocabulary has hundreds of thousands: as a rule `short_strings` reads them."""
        return self.short_strings(count) or self.any_strings(count)

    def short_strings(self, count: int) -> list[str]:
        """`count` strings of 1 to 255 bytes, which seven zeros of each length keep apart; [] if they are others."""
        window = bytes(self.view[self.position : self.position + _SHORT_WINDOW_BYTES * count])
        # A length; a text and the next length; ...; the last text and what follows.
        first, *pieces = window.split(bytes(7), count)
        if len(pieces) != count or len(first) != 1:
            return []
        try:
            lengths = [first[0], *[piece[-1] for piece in pieces[:-1]]]
            pieces[-1] = pieces[-1][: lengths[-1] + 1]
            if [len(piece) - 1 for piece in pieces] != lengths:
                return []
            texts = str(b"\0".join([piece[:-1] for piece in pieces]), "utf-8").split("\0")
        except (IndexError, UnicodeDecodeError):
            return []
        if len(texts) != count:
            return []
        self.position += 8 * count + sum(lengths)
        return texts

    def any_strings(self, count: int) -> list[str]:
        """`count` strings, one after the other. Raises WeightError."""
        view, position, end = self.view, self.position, len(self.view)
        unpack = struct.Struct("<Q").unpack_from
        result: list[str] = []
        append = result.append
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(view, position)[0]
                if position > end:
                    self.position = start
                    self.need(position - start, "a string")
                append(str(view[start:position], "utf-8"))
        except struct.error:
            self.position = min(position, end)
            self.need(8, "a string")
        except UnicodeDecodeError as error:
            raise self.file.error(f"has text that is not UTF-8 in {self.place}", remedies=_REMEDIES) from error
        self.position = position
        return result

    def value(self, kind: int, depth: int = 0) -> Any:
        """One metadata value of a type that the file names."""
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth == _MAX_NESTING:
            raise self.file.error(f"has the unknown value type {kind} in {self.place}", remedies=_REMEDIES)
        item, length = self.scalar("I"), self.scalar("Q")
        if length > _MAX_ARRAY:
            raise self.file.error(f"has an array of {length} values in {self.place}", remedies=_REMEDIES)
        if item in _SCALARS:
            return self.numbers(np.dtype(_SCALARS[item]).newbyteorder("<"), length)
        self.need(length * (8 if item == _STRING else 12), f"an array of {length}")
        if item == _STRING:
            return self.strings(length)
        return [self.value(item, depth + 1) for _ in range(length)]

    def numbers(self, dtype: np.dtype[Any], length: int) -> list[Any]:
        """`length` numbers or bools."""
        self.need(length * dtype.itemsize, f"an array of {length}")
        end = self.position + length * dtype.itemsize
        values: list[Any] = np.frombuffer(self.view[self.position : end], dtype=dtype).tolist()
        self.position = end
        return values

    def tensor(self, number: int) -> tuple[TensorInfo, int]:
        """One entry of the tensor index, and its offset in the data."""
        self.place = f"the index entry of tensor {number}"
        name = self.string()
        if len(name) > _MAX_NAME_BYTES:
            raise self.file.error(f"has a name of {len(name)} characters in {self.place}", remedies=_REMEDIES)
        self.place = f"the index entry of tensor {name}"
        num_dims = self.scalar("I")
        if num_dims > _MAX_DIMS:
            raise self.file.error(f"has {num_dims} dimensions, at most {_MAX_DIMS} are possible", tensor=name)
        shape = tuple(self.scalar("Q") for _ in range(num_dims))[::-1]
        kind, offset = self.scalar("I"), self.scalar("Q")
        dtype = _TENSOR_TYPES.get(kind)
        if dtype is None:
            raise self.file.error(
                f"has type number {kind}, which is unknown here; llama.cpp has dropped it or added it later",
                tensor=name,
                remedies=("use a file of the same model quantized to a current type, such as Q4_K_M or Q8_0",),
            )
        if math.prod(max(size, 1) for size in shape) >= 2**59:
            raise self.file.error(f"has the impossible shape {list(shape)}", tensor=name, remedies=_REMEDIES)
        try:
            row = row_bytes(dtype, shape[-1] if shape else 1)
        except ValueError as error:
            raise self.file.error(f"has shape {list(shape)}: {error}", tensor=name, remedies=_REMEDIES) from error
        num_bytes = row * math.prod(shape[:-1])
        return TensorInfo(name=name, dtype=dtype, shape=shape, file=str(self.file.path), num_bytes=num_bytes), offset

    def entry(self, info: TensorInfo, data_start: int, offset: int, alignment: int) -> _Entry:
        """The tensor's place in the file, checked."""
        if offset % alignment:
            raise self.file.error(
                f"begins at offset {offset}, which is not a multiple of the alignment {alignment}",
                tensor=info.name,
                remedies=_REMEDIES,
            )
        available = len(self.view) - data_start
        if offset + info.num_bytes > available:
            raise self.file.error(
                f"is truncated: its data ends at byte {offset + info.num_bytes}, the file has {max(available, 0)}",
                tensor=info.name,
                remedies=_REMEDIES,
            )
        return _Entry(info, self.file, data_start + offset)
