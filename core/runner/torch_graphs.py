"""The stock runner for torch devices that record a step of fixed shapes and replay it: graphs, by bucket."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import Unsupported
from ..ops._torch import torch_dtype
from ..platform import Pending, RunnerConfig
from ..stages import Array, IntArray, StepOutput
from .bucketed import BucketedRunner, HostArray, Programs
from .buckets import Bucket, Buckets, ForwardBucket, Grid, SampleBucket, pack
from .caches import CacheArrays
from .done import Done
from .encode_buckets import EncodeBucket
from .packed import cut, join
from .torch import TorchDevice, TorchRunner, memory_errors

aten = torch.ops.aten


class Recorder(Protocol):
    """How a device records."""

    def record(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Remember the operations of `function`.

        Returns what runs them on whatever its arrays hold by then, and gives the function's result: always the same
        arrays, filled anew.
        """
        ...


class GraphRunner(BucketedRunner, TorchRunner):
    """Steps of static shapes on one torch device. Owns an input and the outputs of each recorded bucket.

    Invariant: a recorded program points into the KV caches of now; new caches end them all.
    """

    def __init__(self, config: RunnerConfig, device: TorchDevice, recorder: Recorder, grid: Grid) -> None:
        super().__init__(config, device)
        self.buckets = Buckets(self.config, grid)
        self._functions = Programs(self.config, self.ops, self.buckets, _as_float)
        self._recorder = recorder
        self._recorded: dict[Bucket, _Recorded] = {}
        self._hidden: dict[int, torch.Tensor] = {}

    @property
    def num_recorded(self) -> int:
        """Buckets recorded so far."""
        return len(self._recorded)

    @property
    def num_programs(self) -> int | None:
        """Buckets recorded so far."""
        return self.num_recorded

    def kv_init(self, num_blocks: Sequence[int]) -> None:
        """Allocate the caches; what was recorded over older ones is dropped."""
        self._recorded.clear()
        super().kv_init(num_blocks)

    def program(self, bucket: Bucket) -> Callable[..., Any]:
        """The recorded program of a bucket."""
        if bucket not in self._recorded:
            self._recorded[bucket] = self._record(bucket)
        return self._recorded[bucket]

    def forward(self, bucket: ForwardBucket, packed: IntArray) -> tuple[Array, Array]:
        """Run a forward pass; the caches are written where they lie."""
        hidden_states, hidden, _ = self.program(bucket)(self._params, self._caches(), self._last_tokens, packed)
        return hidden_states, hidden

    def encode(self, bucket: EncodeBucket, packed: IntArray) -> None:
        """Run the encoder; the caches are written where they lie."""
        self.program(bucket)(self._params, self._caches(), packed)

    def fetch(self, arrays: Sequence[Array], finish: Callable[[list[HostArray]], StepOutput]) -> Pending:
        """Bring all arrays to the host in one copy."""
        if not arrays:
            return Done(finish([]))
        return self.receive(join(arrays), lambda words: finish(cut(words, arrays)))

    def errors(self, what: str) -> AbstractContextManager[None]:
        """Turns torch's errors into OutOfMemory; what is inside goes to the device and is not differentiated."""
        self.device.activate()
        return _inference(what)

    def keep(self, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        """Copies: the next replay writes into the same outputs."""
        return tuple(array.clone() for array in arrays)

    def close(self) -> None:
        """Drop parameters, caches and programs."""
        self._recorded.clear()
        self._hidden.clear()
        super().close()

    def stage(self, words: IntArray) -> torch.Tensor:
        """A step's input on the host, as a copy to the device takes it best."""
        return torch.from_numpy(words)

    def _caches(self) -> CacheArrays:
        assert self._kv is not None, "kv_init comes before step"
        return CacheArrays.of(self._kv)

    def _record(self, bucket: Bucket) -> "_Recorded":
        function = self._functions.function(bucket)
        device = self.device.torch_device
        packed = torch.from_numpy(pack(self.buckets.layout(bucket), {})).to(device, copy=True)
        if isinstance(bucket, ForwardBucket | EncodeBucket):
            tokens = (self._last_tokens,) if isinstance(bucket, ForwardBucket) else ()
            replay = self._recorder.record(lambda: function(self._params, self._caches(), *tokens, packed))
            return _Recorded(self.stage, replay, packed, None)
        rows = bucket.num_samples if isinstance(bucket, SampleBucket) else bucket.num_tokens
        hidden = self._hidden.get(rows)
        if hidden is None:
            shape, dtype = (rows, self.config.spec.hidden_size), torch_dtype(self.config.dtype)
            hidden = self._hidden[rows] = torch.zeros(shape, dtype=dtype, device=device)
        last_tokens = (self._last_tokens,) if isinstance(bucket, SampleBucket) else ()
        replay = self._recorder.record(lambda: function(self._params, hidden, *last_tokens, packed))
        return _Recorded(self.stage, replay, packed, hidden)


class _Recorded:
    """One recorded bucket: it takes what the function took, and gives the same output arrays every time."""

    def __init__(
        self,
        stage: Callable[[IntArray], torch.Tensor],
        replay: Callable[[], Any],
        packed: torch.Tensor,
        hidden: torch.Tensor | None,
    ) -> None:
        self._stage = stage
        self._replay = replay
        self._packed = packed
        self._hidden = hidden

    def __call__(self, params: Any, *arrays: Any) -> Any:
        self._packed.copy_(self._stage(arrays[-1]), non_blocking=True)
        if self._hidden is not None:
            self._hidden.copy_(arrays[0])
        return self._replay()


class Rerun:
    """A recorder for emulated devices whose kernels torch does not see: it calls the function again, over the same
    inputs and into the same outputs. Recording runs nothing."""

    def record(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """A replay calls `function`."""
        results: list[Any] = []

        def replay() -> Any:
            new = function()
            if not results:
                results.append(new)
            for old, its_new in zip(_tensors(results[0]), _tensors(new), strict=True):
                if its_new is not old:
                    old.copy_(its_new)
            return results[0]

        return replay


class OperationList:
    """A recorder for devices without graphs, emulated ones above all: it notes operations and runs them again.

    Strict as a graph is: no operation may read a value on the host, none may write to a view of an array (some graphs
    cannot hold that), and none may make float64, which accelerators do not have.
    """

    def record(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Run `function` and note its operations. Raises Unsupported for one that a graph could not hold."""
        with Notes() as notes:
            result = function()
        outputs = _tensors(result)

        def replay() -> Any:
            notes.replay(outputs)
            return result

        return replay


def _tensors(result: Any) -> list[torch.Tensor]:
    """What a step returns, less what it wrote in place and torch does not know: caches of integers."""
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


HOST_READS = {
    aten._local_scalar_dense.default,
    aten.item.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
}


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a replay keeps the result of one operation for those that take it."""

    number: int


class Notes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operation: what it took, results of earlier ones as slots, and the slots of what it made.

    Results are not kept alive: while a step is recorded it takes no more memory than otherwise.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[tuple[Any, Any, Any, list[_Slot | None]]] = []
        self.slots: Any = WeakIdKeyDictionary()
        self.last_use: dict[int, int] = {}
        """by slot, the place of the last operation that takes or makes it"""
        self._constants: Any = WeakIdKeyDictionary()
        """results of operations on Python's own numbers, which may be read"""
        self._views: Any = WeakIdKeyDictionary()
        """results that share the memory of what they were made of"""

    def results(self) -> list[torch.Tensor]:
        """Results that somebody still holds."""
        return list(self.slots)

    def replay(self, outputs: Sequence[torch.Tensor]) -> None:
        """Run the operations again, on whatever the arrays that they began with hold now, and fill `outputs` anew."""
        values: dict[int, Any] = {}
        results = [(self.slots[output].number, output) for output in outputs if output in self.slots]
        kept = {number for number, _ in results}

        def current(value: Any) -> Any:
            return values[value.number] if isinstance(value, _Slot) else value

        for place, (operation, args, kwargs, made) in enumerate(self.operations):
            again = operation(*tree_map(current, args), **tree_map(current, kwargs))
            for slot, new in zip(made, tree_leaves(again), strict=True):
                if slot is not None:
                    values[slot.number] = new
            for slot in (*_slots((args, kwargs)), *filter(None, made)):
                if self.last_use[slot.number] == place and slot.number not in kept:
                    values.pop(slot.number, None)
        for number, output in results:
            output.copy_(values[number])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in HOST_READS and args[0] in self._constants:
            return func(*args, **kwargs)
        if func in HOST_READS or (func is aten.index.Tensor and any(map(_is_mask, args[1]))):
            raise Unsupported(f"a recorded step reads a value on the host: {func}")
        if _writes(func) and args[0] in self._views:
            raise Unsupported(f"a recorded step writes to a view: {func}")
        taken = tree_map(self._noted, (args, kwargs))
        result = func(*args, **kwargs)
        if _makes_view(func):
            for leaf in _tensors(result):
                self._views[leaf] = True
        made = [self._make(leaf, args) for leaf in tree_leaves(result)]
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64:
                raise Unsupported(f"a recorded step computes in float64: {func}")
        if func is aten.lift_fresh.default:
            self._constants[result] = True
        for slot in (*_slots(taken), *made):
            if slot is not None:
                self.last_use[slot.number] = len(self.operations)
        self.operations.append((func, *taken, made))
        return result

    def _noted(self, value: Any) -> Any:
        return self.slots.get(value, value) if isinstance(value, torch.Tensor) else value

    def _make(self, leaf: Any, args: Sequence[Any]) -> _Slot | None:
        """The slot of a result; None for what needs none: it is no tensor, or an array from outside, written to."""
        if not isinstance(leaf, torch.Tensor):
            return None
        if leaf not in self.slots:
            if any(leaf is arg for arg in args):
                return None
            self.slots[leaf] = _Slot(len(self.last_use))
            self.last_use[self.slots[leaf].number] = len(self.operations)
        slot: _Slot = self.slots[leaf]
        return slot


def _writes(operation: Any) -> bool:
    """True if it writes to the memory of its first argument."""
    first = next(iter(operation._schema.arguments), None)
    is_write = first is not None and first.alias_info is not None and first.alias_info.is_write
    return is_write and operation is not aten.detach_.default


def _makes_view(operation: Any) -> bool:
    """True if its results share the memory of what it takes."""
    return any(x.alias_info is not None and not x.alias_info.is_write for x in operation._schema.returns)


def _slots(tree: Any) -> list[_Slot]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, _Slot)]


def _is_mask(index: torch.Tensor | None) -> bool:
    """True for an index that selects as many rows as it holds ones."""
    return index is not None and index.dtype in (torch.bool, torch.uint8)


@contextmanager
def _inference(what: str) -> Iterator[None]:
    with memory_errors(what), torch.inference_mode():
        yield


def _as_float(words: torch.Tensor) -> torch.Tensor:
    return words.view(torch.float32)
