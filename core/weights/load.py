"""A checkpoint as the declared parameters of a spec: names resolved, everything checked, then read one by one."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ..errors import WeightError
from ..models.params import Param
from .dequantize import to_float32
from .names import NameTable, Stored
from .source import DTYPE_BYTES, HostTensor, LoadedParam, TensorInfo, WeightSource

_MAX_LISTED = 5
_LAYER_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class _Piece:
    """One stored tensor that is a parameter, or a part of one."""

    info: TensorInfo
    stored: Stored


@dataclass(frozen=True, slots=True)
class _Resolved:
    param: Param
    pieces: tuple[_Piece, ...]


class CheckpointParams:
    """A ParamSource over a checkpoint. The caller keeps `source` open while it iterates, and closes it.

    Constants come first, then each parameter once, in the order in which the checkpoint stores them. Nothing is
    kept: what the caller drops is gone.
    """

    def __init__(self, params: Sequence[Param], source: WeightSource, table: NameTable) -> None:
        """Checks the whole index before any data is read.

        Raises one WeightError that lists all tensors that are missing, unexpected, stored twice, or of another
        shape than the spec declares; its `file` and `tensor` are those of the first.
        """
        self._source = source
        self._adds_one = table.adds_one
        resolver = _Resolver(source, table)
        resolved = [resolver.resolve(param) for param in params]
        resolver.check()
        positions = {name: position for position, name in enumerate(source.names())}
        # A constant has no piece, so it sorts before all.
        resolved.sort(key=lambda item: min((positions[piece.info.name] for piece in item.pieces), default=-1))
        self._resolved = resolved

    def params(self) -> Sequence[Param]:
        """All declarations, in the order of `__iter__`."""
        return tuple(item.param for item in self._resolved)

    def __iter__(self) -> Iterator[LoadedParam]:
        """Each parameter once. Raises WeightError if a tensor cannot be read."""
        for item in self._resolved:
            yield LoadedParam(param=item.param, tensors=self._load(item))

    def _load(self, item: _Resolved) -> tuple[HostTensor, ...]:
        if item.param.kind == "constant":
            return (compute_constant(item.param),)
        tensors = []
        for piece in item.pieces:
            tensor = _rearrange(self._source.read(piece.info.name), piece.stored)
            if item.param.plus_one and not self._adds_one:
                tensor = replace(tensor, dtype="float32", data=to_float32(tensor) + np.float32(1.0))
            tensors.append(tensor)
        return tuple(tensors)


def compute_constant(param: Param) -> HostTensor:
    """A parameter of kind "constant", float32 [*param.shape]."""
    assert param.compute is not None, f"constant {param.name} has no compute"
    data = np.ascontiguousarray(param.compute(), dtype=np.float32)
    assert data.shape == param.shape, f"constant {param.name} computes {data.shape}, declares {param.shape}"
    return HostTensor(name=param.name, dtype="float32", shape=param.shape, data=data)


def _rearrange(tensor: HostTensor, stored: Stored) -> HostTensor:
    """The tensor in our layout: undo a stored transposition and the row order of interleaved rope."""
    data, shape = tensor.data, tensor.shape
    if stored.transpose:
        data, shape = np.ascontiguousarray(data.T), shape[::-1]
    if stored.rope_pairs:
        # Rows move as wholes, so that a row of blocks moves like a row of numbers.
        row = data.shape[1:]
        pairs = data.reshape(stored.rope_pairs, -1, 2, *row)
        data = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(data.shape)
    return replace(tensor, shape=shape, data=data)


@dataclass(frozen=True, slots=True)
class _Problem:
    file: str
    tensor: str
    text: str


@dataclass(slots=True)
class _Problems:
    """What is wrong with a checkpoint, all of it."""

    missing: list[_Problem] = field(default_factory=list)
    duplicate: list[_Problem] = field(default_factory=list)
    unfit: list[_Problem] = field(default_factory=list)
    extra: list[_Problem] = field(default_factory=list)
    remedies: dict[str, None] = field(default_factory=dict)
    """an ordered set"""


class _Resolver:
    """Finds the stored tensors of each parameter and collects problems instead of stopping at the first."""

    def __init__(self, source: WeightSource, table: NameTable) -> None:
        self.infos: Mapping[str, TensorInfo] = {name: source.info(name) for name in source.names()}
        self.table = table
        self.used: set[str] = set()
        self.problems = _Problems()
        self.place = _place(list(self.infos.values()))

    def resolve(self, param: Param) -> _Resolved:
        """The pieces of one parameter: the whole, or its parts, whichever the checkpoint holds."""
        if param.kind == "constant":
            return _Resolved(param, ())
        whole = self.entry(param.name)
        wholes = self.find(whole) if whole else []
        entries = [self.entry(part.name) for part in param.parts]
        has_parts = bool(entries) and None not in entries
        assert whole or has_parts, f"the name table has no entry for {param.name} or for all of its parts"
        parts = [(part, entry, self.find(entry)) for part, entry in zip(param.parts, entries, strict=True) if entry]
        found = wholes + [info for _, _, infos in parts for info in infos]
        self.used.update(info.name for info in found)
        any_part = any(infos for _, _, infos in parts)
        if len(wholes) > 1 or (wholes and any_part):
            self.add_duplicate(param.name, found)
        elif wholes and whole:
            return _Resolved(param, (self.fit(param, whole, wholes[0], param.shape),))
        elif has_parts:
            pieces = []
            for part, entry, infos in parts:
                if not infos:
                    self.problems.missing.append(_Problem(self.place, entry.name, entry.name))
                elif len(infos) > 1:
                    self.add_duplicate(part.name, infos)
                else:
                    pieces.append(self.fit(param, entry, infos[0], (part.rows, *param.shape[1:])))
            return _Resolved(param, tuple(pieces))
        elif whole:
            self.problems.missing.append(_Problem(self.place, whole.name, whole.name))
        return _Resolved(param, ())

    def entry(self, canonical: str) -> Stored | None:
        """The table's entry for a canonical name, with its layer index filled in."""
        entries = self.table.entries
        if canonical in entries:
            entry, index = entries[canonical], ""
        else:
            match = _LAYER_INDEX.search(canonical)
            if match is None:
                return None
            template, index = _LAYER_INDEX.sub("{i}", canonical, count=1), match[0]
            if template not in entries:
                return None
            entry = entries[template]
        stored = entry if isinstance(entry, Stored) else Stored(name=entry)
        return replace(stored, name=stored.name.replace("{i}", index))

    def find(self, entry: Stored) -> list[TensorInfo]:
        """The stored tensors under the entry's name, with and without the base prefix."""
        name, prefix = entry.name, self.table.base_prefix
        spellings = [name]
        if prefix:
            spellings.append(name.removeprefix(prefix) if name.startswith(prefix) else prefix + name)
        return [self.infos[spelling] for spelling in spellings if spelling in self.infos]

    def add_duplicate(self, canonical: str, infos: Sequence[TensorInfo]) -> None:
        """Two or more stored tensors claim one parameter."""
        text = f"{canonical} as {' and '.join(info.name for info in infos)}"
        self.problems.duplicate.append(_Problem(infos[0].file, infos[0].name, text))

    def fit(self, param: Param, entry: Stored, info: TensorInfo, shape: tuple[int, ...]) -> _Piece:
        """The piece, after its shape and dtype have been compared with the declared ones."""
        expected = shape[::-1] if entry.transpose else shape
        is_blocked = info.dtype not in DTYPE_BYTES
        text = ""
        if info.shape != expected:
            text = f"{info.name} is {list(info.shape)}, expected {list(expected)}"
            if param.shard == "vocab" and info.shape[1:] == expected[1:]:
                text += f" (it has rows for {info.shape[0]} tokens, the config's vocab_size is {expected[0]})"
                self.problems.remedies[f"set vocab_size to {info.shape[0]}, if the tokenizer has as many tokens"] = (
                    None
                )
        elif is_blocked and entry.transpose:
            text = f"{info.name} is stored transposed in {info.dtype} blocks, which cannot be turned"
        elif not is_blocked and "float" not in info.dtype:
            text = f"{info.name} holds {info.dtype}, expected floating point"
        if text:
            self.problems.unfit.append(_Problem(info.file, info.name, text))
        assert entry.rope_pairs == 0 or shape[0] % (2 * entry.rope_pairs) == 0, f"rope_pairs does not divide {shape}"
        return _Piece(info, entry)

    def check(self) -> None:
        """Raise WeightError if anything is wrong."""
        problems = self.problems
        ignored = re.compile("|".join(f"(?:{pattern})" for pattern in self.table.ignore) or r"(?!)")
        problems.extra += [
            _Problem(info.file, name, name)
            for name, info in self.infos.items()
            if name not in self.used and not ignored.search(name)
        ]
        kinds = [
            (problems.missing, "missing"),
            (problems.duplicate, "stored twice"),
            (problems.unfit, "unlike what the config declares"),
            (problems.extra, "unexpected (no parameter of this model has such a name)"),
        ]
        found = [(some, what) for some, what in kinds if some]
        if not found:
            return
        if problems.missing or problems.extra:
            problems.remedies["use the config.json that belongs to these weights"] = None
        if problems.missing:
            problems.remedies["download the model again"] = None
        first = found[0][0][0]
        reason = "; ".join(f"{_count(some)} {what}: {_listed(some)}" for some, what in found)
        raise WeightError(
            f"{first.file}: {reason}", file=first.file, tensor=first.tensor, remedies=list(problems.remedies)[:3]
        )


def _count(problems: Sequence[_Problem]) -> str:
    return "1 tensor is" if len(problems) == 1 else f"{len(problems)} tensors are"


def _listed(problems: Sequence[_Problem]) -> str:
    more = f" and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
    return ", ".join(problem.text for problem in problems[:_MAX_LISTED]) + more


def _place(infos: Sequence[TensorInfo]) -> str:
    """Where a missing tensor should have been: the file, or the folder of several."""
    files = sorted({info.file for info in infos})
    if len(files) == 1:
        return files[0]
    return str(Path(files[0]).parent) if files else "the checkpoint, which is empty"
