"""Reads safetensors checkpoints, one file or shards with an index, through mappings: no data before its turn.

file:  uint64 header length | header: JSON {name: {dtype, shape, data_offsets: [begin, end]}} | data
index: JSON {"weight_map": {name: shard file}}
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

from ..errors import WeightError
from ..json_text import parse_json
from ..model_file import has_file
from .mapped_file import MappedFile
from .source import DTYPE_BYTES, HostTensor, TensorInfo, numpy_dtype

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64",
    "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_MAX_DIMS = 8
_REMEDIES = ("download the file again", "headrace download MODEL")


@dataclass(frozen=True, slots=True)
class _Entry:
    info: TensorInfo
    file: MappedFile
    begin: int
    """first byte of the data, counted from the start of the file"""


class SafetensorsSource:
    """A WeightSource over one .safetensors file or a .safetensors.index.json beside its shards.

    Everything that the headers say is checked at once; data is read by `read`, as read-only views.
    """

    def __init__(self, path: Path) -> None:
        """Raises WeightError that names the damaged, missing or contradictory file and tensor."""
        self._files: list[MappedFile] = []
        self._entries: dict[str, _Entry] = {}
        try:
            if path.name.endswith(".json"):
                self._add_shards(path)
            else:
                self._add_file(path)
        except WeightError:
            self.close()
            raise

    def names(self) -> Sequence[str]:
        """Names in the order of their data, shard by shard."""
        return tuple(self._entries)

    def info(self, name: str) -> TensorInfo:
        """Index entry of one tensor. KeyError if there is none."""
        return self._entries[name].info

    def read(self, name: str) -> HostTensor:
        """One tensor, a read-only view of the mapping (a copy if the file does not align it)."""
        entry = self._entries[name]
        info = entry.info
        data = entry.file.view(entry.begin, info.num_bytes).view(numpy_dtype(info.dtype))
        if not data.flags.aligned:
            data = data.copy()
        return HostTensor(
            name=name, dtype=info.dtype, shape=info.shape, data=data.reshape(info.shape), file=info.file
        )

    def close(self) -> None:
        """Close all files."""
        for file in self._files:
            file.close()

    def _add_shards(self, index: Path) -> None:
        weight_map = read_weight_map(index)
        for shard in sorted(set(weight_map.values())):
            self._add_file(index.parent / shard)
        for name, shard in weight_map.items():
            entry = self._entries.get(name)
            if entry is None or entry.file.path != index.parent / shard:
                where = f"; it is in {entry.file.path.name}" if entry else ""
                raise WeightError(
                    f"{index.parent / shard}: tensor {name} is missing, though {index.name} lists it there{where}",
                    file=str(index.parent / shard),
                    tensor=name,
                    remedies=_REMEDIES,
                )

    def _add_file(self, path: Path) -> None:
        file = MappedFile(path)
        self._files.append(file)
        for entry in _read_entries(file):
            other = self._entries.get(entry.info.name)
            if other is not None:
                raise file.error(f"is a duplicate: {other.file.path.name} has it too", tensor=entry.info.name)
            self._entries[entry.info.name] = entry


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> shard file of an index (safetensors or pickle), every shard known to exist.

    Raises WeightError that names the index and what is wrong with it.
    """

    def error(what: str, tensor: str = "") -> WeightError:
        return WeightError(f"{index}: {what}", file=str(index), tensor=tensor, remedies=_REMEDIES)

    try:
        content = _parse_json(index.read_bytes())
    except OSError as problem:
        raise error(f"cannot be opened: {problem.strerror or problem}") from problem
    except ValueError as problem:
        raise error(f"is not valid JSON: {problem}") from problem
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise error("has no weight_map of tensor names to shard files")
    for name, shard in weight_map.items():
        is_name = isinstance(shard, str) and 0 < len(shard) < 256
        if not is_name or PurePosixPath(shard).is_absolute() or ".." in PurePosixPath(shard).parts:
            raise error(f"puts tensor {name} into {shard!r}, which is not a file of this folder", tensor=name)
    missing = sorted(shard for shard in set(weight_map.values()) if not has_file(index.parent / shard))
    if missing:
        listed = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        first = next(name for name, shard in weight_map.items() if shard == missing[0])
        raise error(f"lists {len(missing)} shard files that are not in the folder: {listed}", tensor=first)
    return weight_map


def _read_entries(file: MappedFile) -> list[_Entry]:
    """All tensors of one file by position, with every number checked against the file."""
    size = len(file.bytes)
    if size < 8:
        raise file.error(f"is truncated: {size} bytes cannot hold a safetensors header", remedies=_REMEDIES)
    length = int.from_bytes(file.bytes[:8].tobytes(), "little")
    if length > _MAX_HEADER_BYTES or (length > size - 8 and file.bytes[8:9].tobytes() != b"{"):
        raise file.error(f"is not a safetensors file: its header would take {length} bytes", remedies=_REMEDIES)
    if length > size - 8:
        raise file.error(f"is truncated: the header takes {length} bytes, {size - 8} are there", remedies=_REMEDIES)
    try:
        header = _parse_json(file.bytes[8 : 8 + length].tobytes())
    except _RepeatedKey as problem:
        raise file.error("is a duplicate: the header has it twice", tensor=problem.key) from problem
    except ValueError as problem:
        raise file.error(f"has a damaged header: {problem}", remedies=_REMEDIES) from problem
    if not isinstance(header, dict):
        raise file.error("has a damaged header: it is not a JSON object", remedies=_REMEDIES)
    header.pop("__metadata__", None)
    entries = [_read_entry(file, name, fields, 8 + length) for name, fields in header.items()]
    # Empty tensors first, so that they may share their offset with the next one.
    entries.sort(key=lambda entry: (entry.begin, entry.info.num_bytes))
    _check_layout(file, entries, 8 + length)
    return entries


def _read_entry(file: MappedFile, name: str, fields: object, data_start: int) -> _Entry:
    if not isinstance(fields, dict):
        raise file.error("has a damaged header entry: not an object", tensor=name, remedies=_REMEDIES)
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise file.error(f"has dtype {dtype!r}; readable: {', '.join(_DTYPES)}", tensor=name)
    if not _are_sizes(shape) or len(shape) > _MAX_DIMS:
        raise file.error(f"has the impossible shape {shape!r}", tensor=name, remedies=_REMEDIES)
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise file.error(f"has the impossible data_offsets {offsets!r}", tensor=name, remedies=_REMEDIES)
    begin, end = offsets
    num_bytes = math.prod(shape) * DTYPE_BYTES[_DTYPES[dtype]]
    if num_bytes != end - begin:
        raise file.error(
            f"of shape {shape} and dtype {dtype} takes {num_bytes} bytes, its data_offsets span {end - begin}",
            tensor=name,
            remedies=_REMEDIES,
        )
    available = len(file.bytes) - data_start
    if end > available:
        raise file.error(
            f"is truncated: its data ends at byte {end}, the file has {available}", tensor=name, remedies=_REMEDIES
        )
    info = TensorInfo(name=name, dtype=_DTYPES[dtype], shape=tuple(shape), file=str(file.path), num_bytes=num_bytes)
    return _Entry(info, file, data_start + begin)


def _check_layout(file: MappedFile, entries: list[_Entry], data_start: int) -> None:
    """The data must be covered exactly: no overlap, no hole."""
    position = data_start
    for entry in entries:
        if entry.begin != position:
            what = "overlaps the tensor before it" if entry.begin < position else "follows bytes of no tensor"
            raise file.error(
                f"{what}: it begins at byte {entry.begin - data_start}, expected {position - data_start}",
                tensor=entry.info.name,
                remedies=_REMEDIES,
            )
        position += entry.info.num_bytes
    if position != len(file.bytes):
        raise file.error(f"has {len(file.bytes) - position} bytes after the last tensor", remedies=_REMEDIES)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    """Counts whose product numpy can hold."""
    return _are_counts(value) and math.prod(max(size, 1) for size in value) < 2**59


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    """A list of integers of at least zero (JSON's true and 1.0 are none)."""
    return isinstance(value, list) and all(type(count) is int and count >= 0 for count in value)


class _RepeatedKey(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(f"{key} appears twice")
        self.key = key


def _parse_json(data: bytes) -> Any:
    """JSON in which a repeated key is an error. Raises ValueError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) != len(pairs):
            counts = Counter(key for key, _ in pairs)
            raise _RepeatedKey(next(key for key, count in counts.items() if count > 1))
        return content

    return parse_json(data.decode("utf-8"), make=unique)
