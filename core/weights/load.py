"""A checkpoint as the declared parameters of a spec: names resolved, everything checked, then read one by one."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import WeightError
from ..models.params import Param
from .dequantize import to_float32
from .names import INDEX, NameTable, Stored
from .source import DTYPE_BYTES, HostTensor, LoadedParam, TensorInfo, WeightSource

_MAX_LISTED = 5
_PLACE = re.compile(r"\{[ijk]\}")
"""Where a name of a table has a number."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """One stored tensor that is a parameter, or a part of one. info: None for zeros of `shape`. share: which of the
    equal parts of a tensor it is, -1 for all of it. repeats: so many times its first row."""

    info: TensorInfo | None
    stored: Stored
    shape: tuple[int, ...] = ()
    share: int = -1
    repeats: int = 0


@dataclass(frozen=True, slots=True)
class _Resolved:
    param: Param
    pieces: tuple[_Piece, ...]


@dataclass(frozen=True, slots=True)
class _Found:
    """A canonical name, the table's entry for it, and the stored tensors of that entry: one, if all is well."""

    canonical: str
    stored: Stored
    infos: tuple[TensorInfo, ...]


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
        resolver = Resolver(source, table)
        resolved = [resolver.resolve(param) for param in params]
        resolver.check()
        positions = {name: position for position, name in enumerate(source.names())}
        # What is computed has no piece, so it sorts before all.
        stored = [
            [positions[piece.info.name] for piece in item.pieces if piece.info is not None] for item in resolved
        ]
        order = sorted(range(len(resolved)), key=lambda i: min(stored[i], default=-1))
        resolved = [resolved[i] for i in order]
        self._resolved = resolved

    def params(self) -> Sequence[Param]:
        """All declarations, in the order of `__iter__`."""
        return tuple(item.param for item in self._resolved)

    def __iter__(self) -> Iterator[LoadedParam]:
        """Each parameter once. Raises WeightError if a tensor cannot be read."""
        for item in self._resolved:
            yield LoadedParam(param=item.param, tensors=self._load(item))

    def _load(self, item: _Resolved) -> tuple[HostTensor, ...]:
        if not item.pieces:
            return (compute_constant(item.param),)
        tensors, kept = [], dict[str, HostTensor]()
        for piece in item.pieces:
            if piece.info is None:
                zeros = np.zeros(piece.shape, np.float32)
                tensors.append(HostTensor(name=piece.stored.name, dtype="float32", shape=piece.shape, data=zeros))
                continue
            name = piece.info.name
            tensor = kept.get(name) or self._source.read(name)
            if piece.share >= 0:
                kept[name] = tensor
                num_rows = tensor.shape[0] // item.param.num_stacked
                tensor = tensor.rows(slice(piece.share * num_rows, (piece.share + 1) * num_rows))
            if piece.repeats:
                shape = (piece.repeats, *tensor.shape[1:])
                tensor = replace(tensor, shape=shape, data=np.repeat(tensor.data[:1], piece.repeats, axis=0))
            if tensor.scales is not None and not is_in_place(piece.stored, item.param):
                tensor = replace(tensor, dtype="float32", data=to_float32(tensor), scales=None, offsets=None)
            tensor = rearrange(tensor, piece.stored, item.param)
            if piece.stored.minus_exp:
                tensor = replace(tensor, dtype="float32", data=np.log(-to_float32(tensor)))
            if item.param.plus_one and not self._adds_one:
                tensor = replace(tensor, dtype="float32", data=to_float32(tensor) + np.float32(1.0))
            if piece.stored.scaled_by:
                scales = _opened(to_float32(self._source.read(piece.stored.scaled_by)), piece.stored)
                factors = np.repeat(scales, tensor.shape[0] // len(scales))
                rows = to_float32(tensor) * factors.reshape(-1, *(1,) * (len(tensor.shape) - 1))
                tensor = replace(tensor, dtype="float32", data=rows)
            if item.param.unit_rows:
                tensor = _with_unit_rows(tensor)
            tensors.append(tensor)
        if item.param.combine is not None:
            data = np.asarray(item.param.combine(*map(to_float32, tensors)), np.float32)
            return (HostTensor(name=item.param.name, dtype="float32", shape=data.shape, data=data),)
        return tuple(tensors)


def compute_constant(param: Param) -> HostTensor:
    """A parameter that is not read but computed, float32 [*param.shape]."""
    assert param.compute is not None, f"{param.name} has no compute"
    data = np.ascontiguousarray(param.compute(), dtype=np.float32)
    assert data.shape == param.shape, f"{param.name} computes {data.shape}, declares {param.shape}"
    return HostTensor(name=param.name, dtype="float32", shape=param.shape, data=data)


def is_in_place(stored: Stored, param: Param) -> bool:
    """True if a stored tensor is the parameter as it stands."""
    return stored == Stored(name=stored.name, also=stored.also, copies=stored.copies) and not (
        param.plus_one or param.unit_rows
    )


def _with_unit_rows(tensor: HostTensor) -> HostTensor:
    """The tensor with rows of length 1, in its own dtype where numpy has it."""
    rows = to_float32(tensor)
    rows = rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), np.float32(1e-7))
    dtype = "float16" if tensor.dtype == "float16" else "float32"
    return replace(tensor, dtype=dtype, data=rows.astype(dtype))


def rearrange(tensor: HostTensor, stored: Stored, param: Param) -> HostTensor:
    """The tensor in our layout: undo a stored transposition, an axis of stacked matrices, an interleaving of the
    parts of a fused parameter, and the row order of interleaved rope. Rows of blocks move like rows of numbers."""
    data, shape = tensor.data, tensor.shape
    if stored.is_scalar:
        if stored.gate:
            data = _opened(to_float32(tensor), stored)
            tensor = replace(tensor, dtype="float32")
        data, shape = np.broadcast_to(data, param.shape), param.shape
    if stored.joined:
        size = shape[1] // (param.num_joined + 1)
        rest = data[:, size:].reshape(shape[0], size, -1).swapaxes(1, 2).reshape(shape[0], -1)
        data = np.concatenate([data[:, :size], rest], axis=1)
    if stored.kernel:
        shape = (shape[0], math.prod(shape[1:]))
        data = np.swapaxes(data.reshape(shape[0], -1, stored.kernel), 1, 2).reshape(shape)
    if stored.reshape:
        data = data.reshape(-1, *param.shape[1:])  # of the whole, or of a part
        shape = data.shape
    if stored.transpose:
        data, shape = np.swapaxes(data, -1, -2), (*shape[:-2], shape[-1], shape[-2])
    if stored.stacked:
        shape = (shape[0] * shape[1], *shape[2:])
        if not tensor.is_blocked:
            data = data.reshape(shape)
    if stored.skip_rows or stored.extra_rows:
        kept = slice(stored.skip_rows, shape[0] - stored.extra_rows)
        data, shape = data[kept], (kept.stop - kept.start, *shape[1:])
    row = data.shape[1:]
    if stored.interleaved:
        num_groups = stored.groups or param.num_groups
        rows = [part.rows for part in param.parts[: len(param.parts) // param.num_stacked]]
        order = stored.order or tuple(range(len(rows)))
        stack = data.reshape(param.num_stacked, num_groups, -1, *row)
        ends = np.cumsum([rows[n] // num_groups for n in order])[:-1]
        pieces = dict(zip(order, np.split(stack, ends, axis=2), strict=True))
        joined = [pieces[n].reshape(param.num_stacked, -1, *row) for n in range(len(rows))]
        data = np.concatenate(joined, axis=1).reshape(-1, *row)
    if stored.tiled:
        count, times = _tiles(param, len(data))
        once = data[: 2 * count].reshape(2, count, *row)
        many = np.concatenate([once] * times, axis=1).reshape(-1, *row)
        data = np.concatenate([many, data[2 * count :]])
        shape = (len(data), *shape[1:])
    if stored.rope_pairs:
        data = data.reshape(stored.rope_pairs, -1, 2, *row).swapaxes(1, 2).reshape(-1, *row)
    return replace(tensor, shape=shape, data=np.ascontiguousarray(data))


def _tiles(param: Param, num_rows: int) -> tuple[int, int]:
    """Rows that a tensor of so many holds of a query, and how many times they stand in the parameter; (0, 0) if the
    numbers do not fit."""
    rows, values = param.parts[0].rows, param.parts[2].rows
    count = (num_rows - values) // 2
    fits = count > 0 and num_rows == values + 2 * count and rows % count == 0
    return (count, rows // count) if fits else (0, 0)


def _opened(gate: npt.NDArray[np.float32], stored: Stored) -> npt.NDArray[np.float32]:
    """A gate as what it lets through; factors that are none as they are."""
    if not stored.gate:
        return gate
    return np.tanh(gate) if stored.gate == "tanh" else np.float32(1.0) - np.tanh(gate)


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
    remedies: list[str] = field(default_factory=list)


class Resolver:
    """Finds the stored tensors of each parameter and collects problems instead of stopping at the first.

    used: names of the tensors that were found."""

    def __init__(self, source: WeightSource, table: NameTable) -> None:
        self.infos: Mapping[str, TensorInfo] = {name: source.info(name) for name in source.names()}
        self.by_name: dict[str, list[TensorInfo]] = {}
        self.renamed = {name: _rename(name, table) for name in self.infos}
        for name, info in self.infos.items():
            self.by_name.setdefault(self.renamed[name], []).append(info)
        self.patterns = {_pattern(name) for name in self.by_name}
        self.table = table
        self.table = replace(table, entries={name: self.known(stored) for name, stored in table.entries.items()})
        self.used: set[str] = set()
        self.problems = _Problems()
        self.place = _place(list(self.infos.values()))

    def resolve(self, param: Param) -> _Resolved:
        """The pieces of one parameter: the whole, or its parts, whichever the checkpoint holds."""
        if param.kind == "constant":
            return _Resolved(param, ())
        whole = self.look_up(param.name)
        if param.compute is not None and not (whole and whole.infos):
            return _Resolved(param, ())
        cuts = param.parts
        if param.larger_parts and all(self.table.entry(part.name) for part in param.larger_parts):
            cuts = param.larger_parts
        parts = [found for part in cuts if (found := self.look_up(part.name))]
        has_parts = bool(parts) and len(parts) == len(cuts)
        assert whole or has_parts, f"the name table has no entry for {param.name} or for all of its parts"
        in_parts = [info for part in parts for info in part.infos]
        if whole and whole.infos and in_parts:
            self.add_duplicate(param.name, [*whole.infos, *in_parts])
            return _Resolved(param, ())
        is_whole = whole and (whole.infos or not has_parts or (not in_parts and self.is_spelled(whole.stored.name)))
        if whole and is_whole:
            return _Resolved(param, self.take(param, whole, param.shape))
        pieces: list[_Piece] = []
        rows, stored = [part.rows for part in cuts], [info.shape[0] for info in in_parts if info.shape]
        if all(part.stored.cut_anywhere for part in parts) and len(stored) == len(rows) and sum(stored) == sum(rows):
            rows = stored
        for num_rows, found in zip(rows, parts, strict=True):
            pieces += self.take(param, found, (num_rows, *param.shape[1:]))
        return _Resolved(param, tuple(pieces))

    def look_up(self, canonical: str) -> _Found | None:
        """What the checkpoint holds for a canonical name; None if the table does not know the name."""
        stored = self.table.entry(canonical)
        if stored is None:
            return None
        infos = tuple(info for name in (stored.name, *stored.also) for info in self.find(name))
        self.used.update(info.name for info in infos)
        copies = [info for name in stored.copies for info in self.find(name)]
        self.used.update(info.name for info in copies)
        infos = infos or tuple(copies[:1])
        return _Found(canonical, stored, infos)

    def take(self, param: Param, found: _Found, shape: tuple[int, ...]) -> tuple[_Piece, ...]:
        """The one tensor found, compared with `shape`; nothing, and a problem noted, if there is none or more."""
        if found.stored.zeros:
            return (_Piece(None, found.stored, shape),)
        match found.infos:
            case (info,):
                stored, matrix = found.stored, (param.num_stacked, shape[0] // param.num_stacked, *shape[1:])
                if stored.transpose and stored.stacked and info.shape == matrix != (matrix[0], *matrix[:0:-1]):
                    stored = replace(stored, transpose=False)
                if stored.scaled_by:
                    infos = self.find(stored.scaled_by)
                    is_scalar = not stored.stacked and any(info.shape == (1,) for info in infos)
                    scales = _Found(found.canonical, Stored(name=stored.scaled_by, is_scalar=is_scalar), infos)
                    for piece in self.take(param, scales, (param.num_stacked if stored.stacked else shape[0],)):
                        stored = replace(stored, scaled_by=piece.info.name if piece.info is not None else "")
                num_beyond = shape[0] - info.shape[0] if stored.first_beyond and info.shape else 0
                stored = replace(stored, extra_rows=max(-num_beyond, stored.extra_rows))
                shape = (shape[0] - max(num_beyond, 0), *shape[1:])
                self.compare(param, info, stored, shape)
                self.used.update((info.name, stored.scaled_by))
                share = int(INDEX.findall(found.canonical)[-1]) if stored.share else -1
                beyond = (_Piece(info, stored, repeats=num_beyond),) if num_beyond > 0 else ()
                return (_Piece(info, stored, share=share), *beyond)
            case ():
                names = (found.stored.name, *found.stored.also, *found.stored.copies[:1])
                self.problems.missing.append(_Problem(self.place, names[0], " or ".join(names)))
            case infos:
                self.add_duplicate(found.canonical, infos)
        return ()

    def find(self, name: str) -> tuple[TensorInfo, ...]:
        """The stored tensors called `name`, with and without the base prefix."""
        return tuple(info for spelling in self.spellings(name) for info in self.by_name.get(spelling, ()))

    def spellings(self, name: str) -> tuple[str, ...]:
        """A name with and without the base prefix."""
        prefix = self.table.base_prefix
        other = name.removeprefix(prefix) if name.startswith(prefix) else prefix + name
        return (name, other) if prefix else (name,)

    def is_spelled(self, name: str) -> bool:
        """True if the checkpoint has this name, for whatever layers, experts or heads."""
        return any(_pattern(spelling) in self.patterns for spelling in self.spellings(name))

    def known(self, stored: str | Stored) -> str | Stored:
        """An entry with those of its spellings that this checkpoint has; with all if it has none."""
        if not isinstance(stored, Stored) or not stored.also:
            return stored
        names = [name for name in (stored.name, *stored.also) if self.is_spelled(name)]
        return replace(stored, name=names[0], also=tuple(names[1:])) if names else stored

    def add_duplicate(self, canonical: str, infos: Sequence[TensorInfo]) -> None:
        """Two or more stored tensors claim one parameter."""
        text = f"{canonical} as {' and '.join(info.name for info in infos)}"
        self.problems.duplicate.append(_Problem(infos[0].file, infos[0].name, text))

    def compare(self, param: Param, info: TensorInfo, stored: Stored, shape: tuple[int, ...]) -> None:
        """Note a problem if the stored tensor's shape or dtype is not what is declared."""
        expected = shape
        if stored.stacked:
            expected = (param.num_stacked, shape[0] // param.num_stacked, *shape[1:])
        if stored.skip_rows or stored.extra_rows:
            expected = (shape[0] + stored.skip_rows + stored.extra_rows, *shape[1:])
        if stored.tiled and info.shape and (count := _tiles(param, info.shape[0])[0]):
            expected = (2 * count + param.parts[2].rows, *shape[1:])
        if stored.is_scalar:
            expected = (1,)
        if stored.kernel and len(info.shape) != 3:  # an image's, or with taps and inputs in one axis
            expected = info.shape if math.prod(info.shape) == math.prod(shape) else shape
        elif stored.kernel:
            expected = (shape[0], shape[1] // stored.kernel, stored.kernel)
        if stored.transpose:
            expected = (*expected[:-2], expected[-1], expected[-2])
        if stored.share:
            expected = (expected[0] * param.num_stacked, *expected[1:])
        is_blocked = info.dtype not in DTYPE_BYTES
        if stored.reshape and math.prod(info.shape) == math.prod(expected):
            expected = info.shape
        text = ""
        if info.shape != expected:
            text = f"{info.name} is {list(info.shape)}, expected {list(expected)}"
            if param.shard == "vocab" and info.shape[1:] == expected[1:]:
                text += f" (it has rows for {info.shape[0]} tokens, the config's vocab_size is {expected[0]})"
                remedy = f"set vocab_size to {info.shape[0]}, if the tokenizer has as many tokens"
                self.problems.remedies.append(remedy)
        elif is_blocked and stored.transpose:
            text = f"{info.name} is stored transposed in {info.dtype} blocks, which cannot be turned"
        elif not is_blocked and "float" not in info.dtype:
            text = f"{info.name} holds {info.dtype}, expected floating point"
        if text:
            self.problems.unfit.append(_Problem(info.file, info.name, text))
        fits_pairs = not stored.rope_pairs or shape[0] % (2 * stored.rope_pairs) == 0
        assert fits_pairs, f"the {shape[0]} rows of {info.name} are no pairs of {stored.rope_pairs} heads"

    def check(self) -> None:
        """Raise WeightError if anything is wrong."""
        problems = self.problems
        ignored = re.compile("|".join(f"(?:{pattern})" for pattern in self.table.ignore) or r"(?!)")
        problems.extra += [
            _Problem(info.file, name, name)
            for name, info in self.infos.items()
            if name not in self.used and 0 not in info.shape and not ignored.search(self.renamed[name])
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
            problems.remedies.append("use the config.json that belongs to these weights")
        if problems.missing:
            problems.remedies.append("download the model again")
        first = found[0][0][0]
        reason = "; ".join(f"{_count(some)} {what}: {_listed(some)}" for some, what in found)
        remedies = list(dict.fromkeys(problems.remedies))[:3]
        raise WeightError(f"{first.file}: {reason}", file=first.file, tensor=first.tensor, remedies=remedies)


def _rename(name: str, table: NameTable) -> str:
    for pattern, replacement in table.renames:
        name = re.sub(pattern, replacement, name)
    return name


def _pattern(name: str) -> str:
    """A name, or one of a table, without the numbers of layers, experts and heads."""
    return INDEX.sub("0", _PLACE.sub("0", name))


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
