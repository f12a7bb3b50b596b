"""Tensor parallelism on torch's devices: one process a rank, one runner each, seen as one runner by the engine."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy.typing as npt
import torch.distributed as dist

from ..errors import DeviceUnavailable, HeadraceError
from ..models.params import Param
from ..models.spec import ModelSpec
from ..ops import Selection
from ..platform import KVPlan, Memory, Pending, PreparedOp, Runner, RunnerConfig
from ..sampling.sampler import run_processor
from ..stages import FloatArray, StepInput, StepOutput
from ..weights.source import LoadedParam, ParamSource
from .collectives import Group
from .ranks import Ranks
from .sharding import Share, make_share
from .torch import TorchDevice, TorchRunner

Processor = Callable[[FloatArray], FloatArray]
_WAIT = timedelta(minutes=10)
"""How long a rank waits for another that is alive."""


def join(device: TorchDevice, spec: ModelSpec, tp_rank: int, tp_size: int, store: str) -> tuple[Group, Share]:
    """Meet the other ranks. store: a file that all can reach. Raises Unsupported and DeviceUnavailable."""
    share = make_share(spec, tp_rank, tp_size)
    if dist.is_initialized():
        raise DeviceUnavailable(
            "this process belongs to a group of torch.distributed already, and can belong to one only",
            remedies=["--tensor-parallel-size 1", "a process of its own for each model"],
        )
    if device.collectives == "gloo":  # it would look for an interface by the machine's name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        device.collectives,
        store=dist.FileStore(store, tp_size),  # type: ignore[attr-defined]
        rank=tp_rank,
        world_size=tp_size,
        timeout=_WAIT,
    )
    group = dist.group.WORLD
    assert group is not None, "the group of all ranks is there"
    return Group(group.group_name, tp_rank=tp_rank, tp_size=tp_size), share


class RankedRunner(Runner):
    """Owns rank 0's runner and the processes of the other ranks. Each call goes to all of them.

    Invariant: all ranks run the same steps in the same order, or the group is at an end.
    """

    def __init__(self, config: RunnerConfig, device: TorchDevice) -> None:
        make_share(config.spec, 0, device.tp_size)  # says what cannot be cut before a process starts
        self.config = config
        self._device = device
        self._is_closed = False
        self._ranks = Ranks(device.ranks, _abort)
        try:
            self._ranks.start(config.engine, config)
            with self._named():
                device.group, device.share = join(device, config.spec, 0, device.tp_size, self._ranks.store)
            self._shares = [make_share(config.spec, tp_rank, device.tp_size) for tp_rank in range(device.tp_size)]
            self._own: TorchRunner = device.own_runner(config)
            self._ranks.answers()
        except BaseException:
            self.close()
            raise
        self.ops = self._own.plain_ops

    @property
    def num_programs(self) -> int | None:
        """Those of rank 0."""
        return self._own.num_programs

    @property
    def op_selections(self) -> Sequence[Selection]:
        """Those of rank 0."""
        return self._own.op_selections

    def load(self, params: ParamSource) -> None:
        """Give each rank its share of each parameter."""
        self._ranks.tell(("load",))
        self._own.load(SharedParams(params, self._shares, self._ranks))
        self._ranks.tell(None)
        self._ranks.answers()

    def kv_plan(self) -> KVPlan:
        """Bytes of one block on all ranks together."""
        plan = self._own.kv_plan()
        size = self._device.tp_size
        return dataclasses.replace(
            plan, block_bytes=tuple(size * count for count in plan.block_bytes), step_bytes=size * plan.step_bytes
        )

    def kv_init(self, num_blocks: Sequence[int]) -> None:
        """Allocate on every rank."""
        self._everywhere("kv_init", lambda: self._own.kv_init(num_blocks), num_blocks)

    def warmup(self) -> None:
        """Compile or record on every rank."""
        self._everywhere("warmup", self._own.warmup)

    def step(self, batch: StepInput) -> Pending:
        """Run a step on every rank; logits processors run on rank 0 alone. Raises what one of them raised."""
        errors: list[Exception] = []
        self._ranks.tell(("step", _with_processors(batch, lambda process: unchanged)))
        with self._named():
            pending = self._own.step(_with_processors(batch, lambda process: _guarded(process, errors)))
        if errors:
            raise errors[0]
        return RankedStep(pending, self)

    def memory(self) -> Memory:
        """Of all devices together, as much as fits on the fullest of them times their number."""
        if self._device.caps.shared_memory:
            return self._own.memory()
        self._ranks.tell(("memory",))
        found: list[Memory] = [self._own.memory(), *self._ranks.answers()]
        return Memory(
            total_bytes=sum(memory.total_bytes for memory in found),
            free_bytes=len(found) * min(memory.free_bytes for memory in found),
            used_bytes=sum(memory.used_bytes for memory in found),
        )

    def collective(self, name: str, arrays: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        """What each rank gets, given what each has."""
        own, *others = arrays
        self._ranks.tell_each([("collective", name, array) for array in others])
        with self._named():
            result = self._device.collective(name, own)
        return [result, *self._ranks.answers()]

    def prepare_op(self, op: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> PreparedOp:
        """Rank 0's."""
        return self._own.prepare_op(op, arguments, options)

    def close(self) -> None:
        """End the other ranks, free this one."""
        if self._is_closed:
            return
        self._is_closed = True
        if hasattr(self, "_own"):
            self._own.close()
        self._ranks.close()
        self._device.group = self._device.share = None
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()

    def _everywhere(self, name: str, own: Callable[[], None], *args: Any) -> None:
        self._ranks.tell((name, *args))
        with self._named():
            own()
        self._ranks.answers()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Say which rank has died, where this one only hears that a connection is closed."""
        try:
            yield
        except HeadraceError:
            raise
        except RuntimeError as error:
            raise self._ranks.lost() from error


class RankedStep:
    """A step that is under way on every rank."""

    def __init__(self, own: Pending, runner: RankedRunner) -> None:
        self._own = own
        self._runner = runner

    def ready(self) -> bool:
        """True if rank 0 is done."""
        return self._own.ready()

    def result(self) -> StepOutput:
        """Rank 0's output. Raises DeviceLost if another rank has died."""
        with self._runner._named():
            return self._own.result()


class SharedParams:
    """A ParamSource of rank 0's share; the others' are sent on the way."""

    def __init__(self, source: ParamSource, shares: Sequence[Share], ranks: Ranks) -> None:
        self._source = source
        self._shares = shares
        self._ranks = ranks

    def params(self) -> Sequence[Param]:
        """Rank 0's declarations."""
        return tuple(own for _, own in self._shares[0].params.values())

    def __iter__(self) -> Iterator[LoadedParam]:
        """Rank 0's share of each parameter."""
        for loaded in self._source:
            own, *others = (share.take(loaded) for share in self._shares)
            self._ranks.tell_each([(loaded.param.name, other.tensors) for other in others])
            yield own


def unchanged(logits: FloatArray) -> FloatArray:
    """Stands for a logits processor on ranks that do not sample."""
    return logits


def _with_processors(batch: StepInput, change: Callable[[Processor], Processor]) -> StepInput:
    sampling = batch.sampling
    if sampling is None or not sampling.processors:
        return batch
    processors = [(row, change(process)) for row, process in sampling.processors]
    return dataclasses.replace(batch, sampling=dataclasses.replace(sampling, processors=processors))


def _guarded(process: Processor, errors: list[Exception]) -> Processor:
    """A processor whose error waits until the step's collectives are done."""

    def run(logits: FloatArray) -> FloatArray:
        try:
            return run_processor(process, logits)
        except Exception as error:  # noqa: BLE001 - raised behind the step
            errors.append(error)
            return logits

    return run


def _abort() -> None:
    """End the collectives that this process waits in."""
    group = dist.group.WORLD
    if group is not None:
        with contextlib.suppress(RuntimeError, AttributeError, NotImplementedError):
            group.abort()
