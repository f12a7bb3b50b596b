"""Adapters of a model: which of its linear layers they add to, and the stacks that a device holds of them."""

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..config import ModelConfig, lora_pairs
from ..errors import ConfigError, RequestError, Unsupported, WeightError
from ..models.declare import declare_params
from ..models.params import Param, Part
from ..models.spec import AdaptersSpec, ModelSpec
from ..stages import LoraSlot
from ..suggest import did_you_mean
from ..weights.load import Resolver, compute_constant, rearrange
from ..weights.lora import LoraFiles, LoraModule, read_half, read_lora
from ..weights.names import NameTable, Stored
from ..weights.source import HostTensor, LoadedParam, ParamSource, TensorInfo, WeightSource

_LISTED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A module of an adapter: which rows of a layer's output it adds to, and how a checkpoint stores those of the
    layer's weight."""

    module: LoraModule
    start: int
    rows: int
    stored: Stored
    weight: Param


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter and its place in a model. pieces: by the name of a layer, such as layers.0.attn.qkv_proj."""

    files: LoraFiles
    pieces: Mapping[str, Sequence[Piece]]

    def rank(self, layer: str) -> int:
        """Rows of A that it has for a layer, all parts together."""
        return sum(piece.module.rank for piece in self.pieces.get(layer, ()))


def read_adapters(config: ModelConfig, spec: ModelSpec, names: NameTable) -> tuple[Adapter, ...]:
    """The adapters that a configuration names. names: of the model's checkpoints in safetensors. Raises ModelError,
    or Unsupported for a model that takes none."""
    pairs = lora_pairs(config.lora)
    if (pairs or config.max_loras) and (reason := _why_none(spec)):
        raise Unsupported(f"{spec.model_type} takes no adapters here: {reason}", remedies=["without --lora"])
    files = [read_lora(name, Path(path), allow_pickle=config.allow_pickle) for name, path in pairs.items()]
    return tuple(fit(each, spec, names) for each in files)


def with_adapters(spec: ModelSpec, adapters: Sequence[Adapter], config: ModelConfig) -> ModelSpec:
    """The model with room for these adapters, and for others if that is asked for. Raises ConfigError for a rank that
    finds no room."""
    if config.max_loras:
        for adapter in adapters:
            _check_rank(adapter, config.max_lora_rank)
        return dataclasses.replace(
            spec, adapters=AdaptersSpec(num_adapters=config.max_loras, rank=config.max_lora_rank)
        )
    if not adapters:
        return spec
    layers = dict.fromkeys(layer for adapter in adapters for layer in adapter.pieces)
    ranks = tuple((layer, max(adapter.rank(layer) for adapter in adapters)) for layer in layers)
    return dataclasses.replace(spec, adapters=AdaptersSpec(num_adapters=len(adapters), ranks=ranks))


def without_adapters(spec: ModelSpec) -> ModelSpec:
    """The model alone."""
    return dataclasses.replace(spec, adapters=None)


def adapter_params(spec: ModelSpec) -> tuple[Param, ...]:
    """What a model declares for its adapters."""
    if spec.adapters is None:
        return ()
    own = {param.name for param in declare_params(without_adapters(spec))}
    return tuple(param for param in declare_params(spec) if param.name not in own)


class AdapterPlaces:
    """Which adapter stands at which place of the stacks. Owns the names that requests may give.

    Invariant: no two names have one place, and a place that requests still run through is given to nobody.
    """

    def __init__(self, spec: ModelSpec, names: NameTable, adapters: Sequence[Adapter]) -> None:
        """spec: with room for the adapters, which stand at the first places. names: as for `read_adapters`."""
        self._spec = spec
        self._names = names
        self._slots = {
            adapter.files.name: LoraSlot(number=number, digest=adapter.files.digest())
            for number, adapter in enumerate(adapters)
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots)

    def find(self, name: str) -> LoraSlot | None:
        """The adapter of a request; None for "". Raises RequestError."""
        if not name:
            return None
        if name not in self._slots:
            has = f"there are {', '.join(self)}" if self._slots else "none was loaded"
            raise RequestError(
                f"no adapter {name!r}; {has}{did_you_mean(name, self)}",
                code="lora_not_found",
                remedies=[f"--lora {name}=FOLDER"],
            )
        return self._slots[name]

    def read(self, name: str, folder: str, used: Collection[int]) -> "tuple[LoraSlot, PlaceParams]":
        """A place for another adapter, and what is to be loaded there. used: places that requests run through.

        Raises RequestError if there is none or the name is in use, ConfigError for what is no name, ModelError for a
        folder that holds none for this model.
        """
        [path] = lora_pairs([f"{name}={folder}"]).values()
        if name in self._slots:
            raise RequestError(
                f"adapter {name!r} is loaded already", code="lora_exists", remedies=["unload it first"]
            )
        room = self._spec.adapters
        count, taken = 0 if room is None else room.num_adapters, {slot.number for slot in self._slots.values()}
        free = next((number for number in range(count) if number not in taken and number not in used), None)
        if free is None or room is None or not room.rank:
            raise RequestError(
                f"no place for adapter {name!r}: there are {count if room and room.rank else 0} for those that are "
                f"loaded later, and {', '.join(self) or 'requests'} have them",
                code="no_lora_place",
                remedies=["unload another", "a larger HEADRACE_MAX_LORAS"],
            )
        adapter = fit(read_lora(name, Path(path)), without_adapters(self._spec), self._names)
        _check_rank(adapter, room.rank)
        return LoraSlot(number=free, digest=adapter.files.digest()), PlaceParams(self._spec, adapter)

    def add(self, name: str, slot: LoraSlot) -> None:
        """Give a name to what has been loaded."""
        self._slots[name] = slot

    def remove(self, name: str) -> None:
        """Forget a name; requests that run through the adapter go on. Raises RequestError."""
        self.find(name)
        del self._slots[name]


def fit(files: LoraFiles, spec: ModelSpec, names: NameTable) -> Adapter:
    """Find the layers of a model that an adapter adds to. Raises WeightError for a module that is no such layer, or
    has another shape."""
    params = {param.name: param for param in declare_params(without_adapters(spec))}
    layers = _layers(spec)
    resolver = Resolver(_Modules(files.modules), names)
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for layer in layers:
        param = params[f"{layer}.weight"]
        for start, part in _places(param):
            found = resolver.look_up(part.name)
            for info in found.infos if found is not None else ():
                assert found is not None
                module = files.modules[info.name]
                _check_shape(files, module, part, param)
                stored = _order_of(found.stored, module)
                pieces[layer].append(Piece(module=module, start=start, rows=part.rows, stored=stored, weight=param))
    _check_all_used(files, params, resolver)
    return Adapter(files=files, pieces=pieces)


def check_ranks(spec: ModelSpec, tp_size: int) -> None:
    """Raise Unsupported for adapters over several devices."""
    if spec.adapters is not None and tp_size > 1:
        raise Unsupported(
            f"adapters are not cut over {tp_size} devices", remedies=["--tensor-parallel-size 1", "without --lora"]
        )


class AdapterParams:
    """A ParamSource over a model's own parameters, and then those of its adapters."""

    def __init__(self, model: ParamSource, spec: ModelSpec, adapters: Sequence[Adapter]) -> None:
        self._model = model
        self._adapters = adapters
        self._params = adapter_params(spec)

    def params(self) -> Sequence[Param]:
        """All declarations, in the order of `__iter__`."""
        return (*self._model.params(), *self._params)

    def __iter__(self) -> Iterator[LoadedParam]:
        """Each parameter once. Raises WeightError if a tensor cannot be read."""
        yield from self._model
        with ExitStack() as stack:
            sources = [adapter.files.open() for adapter in self._adapters]
            for source in sources:
                stack.callback(source.close)
            for param in self._params:
                values = np.zeros(
                    (param.num_stacked, param.shape[0] // param.num_stacked, param.shape[1]), np.float32
                )
                if param.compute is not None:
                    yield LoadedParam(param=param, tensors=(compute_constant(param),))
                    continue
                for place, adapter, source in zip(values, self._adapters, sources, strict=False):
                    _fill(place, param, adapter, source)
                values = values.reshape(param.shape)
                tensor = HostTensor(name=param.name, dtype="float32", shape=values.shape, data=values)
                yield LoadedParam(param=param, tensors=(tensor,))


class PlaceParams:
    """A ParamSource over one place of the stacks: of each, one matrix, of all layers, those without a module too."""

    def __init__(self, spec: ModelSpec, adapter: Adapter) -> None:
        self._adapter = adapter
        self._params = [param for param in adapter_params(spec) if param.compute is None]

    def params(self) -> Sequence[Param]:
        """The stacks."""
        return tuple(self._params)

    def __iter__(self) -> Iterator[LoadedParam]:
        """Each stack once, with the matrix that becomes part of it. Raises WeightError."""
        source = self._adapter.files.open()
        try:
            for param in self._params:
                values = np.zeros((param.shape[0] // param.num_stacked, param.shape[1]), np.float32)
                _fill(values, param, self._adapter, source)
                tensor = HostTensor(name=param.name, dtype="float32", shape=values.shape, data=values)
                yield LoadedParam(param=param, tensors=(tensor,))
        finally:
            source.close()


def _fill(place: npt.NDArray[np.float32], param: Param, adapter: Adapter, source: WeightSource) -> None:
    """Write what an adapter has into one matrix of a stack of zeros: the A of its parts, one under the other; or the
    B of each in the rows of its part and the columns of its A, times the scale."""
    layer, _, half = param.name.rpartition(".")
    first = 0
    for piece in adapter.pieces.get(layer, ()):
        module, own = piece.module, slice(first, first + piece.module.rank)
        first = own.stop
        if half == "lora_a":
            place[own] = read_half(source, module.a)
            continue
        values = read_half(source, module.b) * np.float32(module.scale)
        tensor = HostTensor(name=module.b.name, dtype="float32", shape=values.shape, data=values)
        place[piece.start : piece.start + piece.rows, own] = rearrange(tensor, piece.stored, piece.weight).data


def _check_rank(adapter: Adapter, most: int) -> None:
    """Raise ConfigError for a module of a larger rank."""
    for module in adapter.files.modules.values():
        if module.rank > most:
            raise ConfigError(
                f"{module.a.file}: tensor {module.a.name} has rank {module.rank}, and max_lora_rank is {most}",
                remedies=[f"HEADRACE_MAX_LORA_RANK={module.rank}"],
            )


class _Modules:
    """The modules of an adapter as if they were the weights that they add to."""

    def __init__(self, modules: Mapping[str, LoraModule]) -> None:
        self._modules = modules

    def names(self) -> Sequence[str]:
        """Of the weights."""
        return tuple(self._modules)

    def info(self, name: str) -> TensorInfo:
        """B, under the name of the weight."""
        return dataclasses.replace(self._modules[name].b, name=name)

    def read(self, name: str) -> HostTensor:
        """Nobody asks."""
        raise KeyError(name)

    def close(self) -> None:
        """Nothing is open."""


def _layers(spec: ModelSpec) -> list[str]:
    """The linear layers that may have adapters: all that a forward pass asks when all have them."""
    every = dataclasses.replace(spec, adapters=AdaptersSpec(num_adapters=1, rank=1))
    names = [param.name for param in declare_params(every)]
    return [name.removesuffix(".lora_a") for name in names if name.endswith(".lora_a")]


def _places(param: Param) -> Iterator[tuple[int, Part]]:
    """All that a checkpoint may hold of a parameter, each with its first row: the whole, its parts, larger parts."""
    yield 0, Part(name=param.name, rows=param.shape[0])
    for parts in (param.parts, param.larger_parts):
        start = 0
        for part in parts:
            yield start, part
            start += part.rows


def _order_of(stored: Stored, module: LoraModule) -> Stored:
    """How the rows of a weight are ordered, which is that of B. Raises WeightError if there is more to it."""
    order = Stored(name=stored.name, interleaved=stored.interleaved, groups=stored.groups, order=stored.order)
    names = dataclasses.replace(order, also=stored.also, copies=stored.copies)
    if dataclasses.replace(names, transpose=stored.transpose, cut_anywhere=stored.cut_anywhere) != stored:
        raise WeightError(
            f"{module.b.file}: tensor {module.b.name} adds to {stored.name}, which is not kept as it is stored; "
            "adapters of it are not served",
            file=module.b.file,
            tensor=module.b.name,
        )
    return order


def _check_shape(files: LoraFiles, module: LoraModule, part: Part, param: Param) -> None:
    for info, expected in (
        (module.a, (module.rank, param.shape[1])),
        (module.b, (part.rows, module.rank)),
    ):
        if info.shape != expected:
            raise WeightError(
                f"{info.file}: tensor {info.name} is {list(info.shape)}, expected {list(expected)}: adapter "
                f"{files.name} is of another model",
                file=info.file,
                tensor=info.name,
            )


def _check_all_used(files: LoraFiles, params: Mapping[str, Param], resolver: Resolver) -> None:
    """Raise WeightError for modules that fit no layer."""
    left = [name for name in files.modules if name not in resolver.used]
    if not left:
        return
    first = files.modules[left[0]].a
    for param in params.values():
        for _, part in _places(param):
            found = resolver.look_up(part.name)
            if found is not None and any(info.name == left[0] for info in found.infos):
                raise WeightError(
                    f"{first.file}: tensor {first.name} adds to {param.name}; adapters of embeddings, heads, experts "
                    "and what is no linear layer of the decoder are not served",
                    file=first.file,
                    tensor=first.name,
                )
    more = f" and {len(left) - _LISTED} more" if len(left) > _LISTED else ""
    raise WeightError(
        f"{first.file}: adapter {files.name} adds to {', '.join(left[:_LISTED])}{more}, and no linear layer of this "
        "model is called so",
        file=first.file,
        tensor=first.name,
        remedies=["an adapter that was made for this model"],
    )


def _why_none(spec: ModelSpec) -> str:
    """Why a model takes no adapters; "" if it does."""
    if spec.foreign is not None:
        return "transformers' own code computes it"
    if spec.kind != "decoder":
        return "only decoders do"
    if spec.pooler is not None:
        return "it makes vectors"
    return "it reads images by cross attention" if any(layer.cross is not None for layer in spec.layers) else ""
