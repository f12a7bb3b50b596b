"""The stock runner for devices that JAX drives: steps compiled by bucket, KV caches donated, parameters on a mesh."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..config import KV_DTYPES
from ..errors import DeviceLost, OutOfMemory, Unsupported
from ..models.spec import ModelSpec
from ..ops import OpTable, Selection, select_ops
from ..ops.jax import FUNCTIONS, NAME
from ..ops.table import DEFINITION
from ..platform import Caps, Device, DeviceInfo, KVPlan, Memory, OpContext, OpProvider, RunnerConfig
from ..stages import Array, IntArray, StepOutput
from ..units import format_bytes
from ..weights.dequantize import to_float32
from ..weights.source import DTYPE_BYTES, HostTensor, LoadedParam, ParamSource
from .bucketed import BucketedRunner, HostArray
from .buckets import Bucket, ForwardBucket
from .caches import CacheArrays
from .encode_buckets import EncodeBucket
from .jax_programs import JaxPrograms, StepShapes, abstract_shapes, make_caches
from .jax_sharding import (
    check_divides,
    is_cut_by_parts,
    kv_sharding,
    make_mesh,
    param_sharding,
    replicated,
    sharded_experts,
)

logger = logging.getLogger(__name__)

_LOST = ("UNAVAILABLE", "DATA_LOSS", "ABORTED", "INTERNAL: Core halted")
"""How the runtime's messages begin when a device does not answer any more."""
_PLACING = ("pack_linear", "pack_stacked", "upload", "to_device")
"""Ops that make arrays on a device."""


def host_devices() -> list[Any]:
    """JAX's devices on this machine's processor; JAX looks for no others unless JAX_PLATFORMS names them."""
    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")
    devices: list[Any] = jax.devices("cpu")
    return devices


class JaxDevice(Device):
    """Devices that JAX addresses, used as one by tensor parallelism. Platforms subclass it and say what they do
    better.

    Keeps the compiled programs of each model, so that a second runner of the same model compiles nothing.
    """

    assumed_bytes: int = 0
    """memory of one device whose runtime does not say how much it has; 0: it must say"""

    def __init__(self, *, info: DeviceInfo, caps: Caps, devices: Sequence[Any]) -> None:
        """devices: JAX's own objects, one rank each."""
        self.info = info
        self.caps = caps
        self.mesh = make_mesh(devices)
        self.programs: dict[tuple[RunnerConfig, tuple[int, ...]], JaxPrograms] = {}

    @property
    def tp_size(self) -> int:
        """Devices of the mesh."""
        return int(self.mesh.size)

    def runner(self, config: RunnerConfig) -> "JaxRunner":
        """A JaxRunner over this device's op providers."""
        return JaxRunner(config, self)

    def block_bytes(self, *, block_size: int, num_kv_heads: int, head_dim: int, dtype: str) -> int:
        """What one KV block of one layer takes on all devices together. dtype: of keys and values in the cache."""
        scale_bytes = DTYPE_BYTES["float32"] if dtype == "int8" else 0
        return 2 * block_size * num_kv_heads * (head_dim * DTYPE_BYTES[dtype] + scale_bytes)

    def compiler_options(self) -> Mapping[str, Any]:
        """What XLA is told for every program."""
        return {}

    def compiles_steps(self, spec: ModelSpec) -> bool:
        """True if a step is one program, compiled before the first request; False if each of its ops is one, compiled
        when it is needed and for all layers that are alike."""
        return True

    def memory(self) -> Memory:
        """Memory of all devices together, by the runtime's own count."""
        total = used = 0
        for device in self.mesh.devices.flat:
            stats = device.memory_stats() or {}
            limit = stats.get("bytes_limit", self.assumed_bytes)
            if not limit:
                raise Unsupported(f"{self.info.id} does not say how much memory it has")
            total, used = total + limit, used + (stats["bytes_in_use"] if stats else _live_bytes(device))
        return Memory(total_bytes=total, free_bytes=total - used, used_bytes=used)

    def close(self) -> None:
        """Forget the compiled programs."""
        self.programs.clear()


class JaxRunner(BucketedRunner):
    """One model on one mesh. Owns parameters and KV caches; a step takes the caches and gives new ones."""

    ops: OpTable

    def __init__(self, config: RunnerConfig, device: JaxDevice) -> None:
        self.config = config
        self.device = device
        check_divides(config.spec, device.mesh.size)
        context = OpContext(
            spec=config.spec, dtype=config.dtype, block_size=config.block_size, kv_dtype=config.kv_dtype
        )
        experts = {"grouped_experts": sharded_experts(device.mesh)} if device.mesh.size > 1 else {}
        stock = OpProvider(name=NAME, priority=0, ops={**FUNCTIONS, **experts}, kv_dtypes=KV_DTYPES)
        providers = (*device.providers(), *device.extra_providers, stock)
        table, self.selections = select_ops(providers, context, wishes=config.engine.device.op_providers)
        self.ops = _bind(table, self.selections, device)
        if any(selection.provider == DEFINITION for selection in self.selections):
            self._trace()
        self._params: dict[str, Array] = {}
        self._kv: CacheArrays | None = None
        self._last_tokens: Array = None
        self._programs: JaxPrograms | None = None

    @property
    def op_selections(self) -> tuple[Selection, ...]:
        """Which provider serves each op, and why others declined."""
        return self.selections

    @property
    def num_programs(self) -> int | None:
        """Programs compiled so far for this model and this number of blocks; None where steps run op by op."""
        return self._programs.num_programs if self._programs is not None else 0

    def load(self, params: ParamSource) -> None:
        """Put each declared parameter on its devices as it comes from the checkpoint."""
        with _errors("weights"):
            for loaded in params:
                self._params[loaded.param.name] = self._put(loaded)
            jax.block_until_ready(self._params)

    def load_adapter(self, number: int, params: ParamSource) -> None:
        """New stacks with each matrix at its place; a step that is under way keeps the old ones."""
        with _errors("an adapter"):
            for loaded in params:
                name, place = loaded.param.name, param_sharding(loaded.param, self.device.mesh)
                one = self.ops.pack_stacked(loaded.tensors, num_stacked=1, dtype=self.config.dtype, device=place)
                self._params[name] = self._params[name].at[number].set(one[0])

    def kv_plan(self) -> KVPlan:
        """Bytes of one block on all devices: keys and values of all layers of a group, as the device pads them."""
        size, dtype = self.config.block_size, self.config.dtype
        return KVPlan(
            block_size=size,
            block_bytes=tuple(
                group.block_bytes(size, dtype)
                if group.kind == "state"
                else sum(
                    self.device.block_bytes(
                        block_size=size,
                        num_kv_heads=num_kv_heads,
                        head_dim=head_dim,
                        dtype=self.config.kv_dtype or dtype,
                    )
                    * (self.device.mesh.size if num_kv_heads == 1 else 1)
                    for num_kv_heads, head_dim in group.heads
                )
                for group in self.config.groups
            ),
        )

    def kv_init(self, num_blocks: Sequence[int]) -> None:
        """Allocate the caches layer by layer; `num_blocks` includes the null block."""
        self._kv = None
        self._programs = None
        plan = self.kv_plan()
        total = sum(n * size for n, size in zip(num_blocks, plan.block_bytes, strict=True))
        what = f"a KV cache of {format_bytes(total)}"
        memory = self.device.memory()
        if total > memory.total_bytes:
            raise OutOfMemory(f"{what} is more than the {format_bytes(memory.total_bytes)} of {self.device.info.id}")
        with _errors(what):
            self._kv = make_caches(self.config, self.ops, self.device.mesh, num_blocks)
            self._last_tokens = self.ops.to_device(np.zeros(self.config.max_num_seqs, np.int32))
            jax.block_until_ready((self._kv, self._last_tokens))
        key = (self.config, tuple(num_blocks))
        if key not in self.device.programs:
            shapes = StepShapes(
                params=self._params,
                kv=self._kv,
                last_tokens=self._last_tokens,
            )
            self.device.programs[key] = JaxPrograms(
                self.config,
                self.ops,
                self.device.mesh,
                shapes,
                self.device.compiler_options(),
                op_by_op=not self.device.compiles_steps(self.config.spec),
            )
        self._programs = self.device.programs[key]
        self.buckets = self._programs.buckets

    def warmup(self) -> None:
        """Compile every bucket, unless steps run op by op."""
        super().warmup()
        if not self.device.compiles_steps(self.config.spec):
            logger.info(
                "steps run op by op, each is compiled when it first runs (%d layers)", self.config.spec.num_layers
            )

    def program(self, bucket: Bucket) -> Callable[..., Any]:
        """The program of a bucket."""
        assert self._programs is not None, "kv_init comes before step"
        compiled: Callable[..., Any] = self._programs.program(bucket)
        return compiled

    def forward(self, bucket: ForwardBucket, packed: IntArray) -> tuple[Array, Array]:
        """Run a forward pass; the caches that went in are gone."""
        program = self.program(bucket)
        kv, self._kv = self._kv, None
        hidden_states, hidden, self._kv = program(self._params, kv, self._last_tokens, packed)
        return hidden_states, hidden

    def encode(self, bucket: EncodeBucket, packed: IntArray) -> None:
        """Run the encoder; the caches that went in are gone."""
        program = self.program(bucket)
        kv, self._kv = self._kv, None
        self._kv = program(self._params, kv, packed)

    def fetch(self, arrays: Sequence[Array], finish: Callable[[list[HostArray]], StepOutput]) -> "RunningStep":
        """Have the arrays copied to the host as soon as they are there."""
        for array in arrays:
            array.copy_to_host_async()
        return RunningStep(arrays=arrays, finish=finish)

    def errors(self, what: str) -> AbstractContextManager[None]:
        """Turn the runtime's errors into OutOfMemory and DeviceLost; others go on."""
        return _errors(what)

    def memory(self) -> Memory:
        """The device's memory now."""
        return self.device.memory()

    def close(self) -> None:
        """Drop parameters and caches."""
        self._params.clear()
        self._kv = None
        self._programs = self._last_tokens = None

    def _trace(self) -> None:
        """Follow the model through its ops without computing. Raises Unsupported for one that has no body here."""
        config, mesh = self.config, self.device.mesh
        shapes = abstract_shapes(config, self.ops, mesh, [1] * len(config.groups))
        programs = JaxPrograms(config, self.ops, mesh, shapes)
        for bucket in {type(bucket): bucket for bucket in programs.buckets.all()}.values():
            programs.trace(bucket)

    # ---- loading ------------------------------------------------------------------------------------------
    def _put(self, loaded: LoadedParam) -> Array:
        param, mesh = loaded.param, self.device.mesh
        sharding = param_sharding(param, mesh)
        pieces = _by_part(loaded) if is_cut_by_parts(param, mesh) else [loaded.tensors]
        if param.kind in ("linear", "embedding"):
            arrays = [self.ops.pack_linear(piece, dtype=self.config.dtype, device=sharding) for piece in pieces]
        elif param.kind == "stacked":
            arrays = [
                self.ops.pack_stacked(piece, num_stacked=param.num_stacked, dtype=self.config.dtype, device=sharding)
                for piece in pieces
            ]
        else:
            arrays = [
                self.ops.upload(_stack(param.name, piece), dtype="float32", device=sharding) for piece in pieces
            ]
        return arrays[0] if len(arrays) == 1 else tuple(arrays)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningStep:
    """A step on the device: arrays that may not be computed yet."""

    arrays: Sequence[Array]
    finish: Callable[[list[HostArray]], StepOutput]

    def ready(self) -> bool:
        """True if `result` would not wait."""
        return all(array.is_ready() for array in self.arrays)

    def result(self) -> StepOutput:
        """Wait for the step. Raises OutOfMemory or DeviceLost."""
        with _errors("a step's activations"):
            arrays = [np.asarray(array) for array in self.arrays]
        return self.finish(arrays)


def _bind(table: OpTable, selections: Sequence[Selection], device: JaxDevice) -> OpTable:
    """Put arrays on every device unless a sharding says otherwise, and let ops without a body in JAX say so when
    they are called."""
    everywhere = replicated(device.mesh)
    for name in _PLACING:
        setattr(table, name, functools.partial(_place, getattr(table, name), everywhere))
    table.new_kv_cache = functools.partial(_place_cache, table.new_kv_cache, device.mesh)
    for selection in selections:
        if selection.provider == DEFINITION:
            setattr(table, selection.op, _missing(selection.op, device.info.id))
    return table


def _place(op: Any, everywhere: Any, *args: Any, device: Any = None, **kwargs: Any) -> Array:
    return op(*args, device=everywhere if device is None or isinstance(device, str) else device, **kwargs)


def _place_cache(op: Any, mesh: Any, *, num_kv_heads: int, device: Any = None, **kwargs: Any) -> Array:
    return op(num_kv_heads=num_kv_heads, device=kv_sharding(mesh, num_kv_heads), **kwargs)


def _missing(op: str, device_id: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise Unsupported(
            f"{device_id} cannot run this model: there is no body of the op {op} in JAX",
            remedies=["--device cpu"],
        )

    return refuse


def _stack(name: str, tensors: Sequence[HostTensor]) -> HostTensor:
    values = np.concatenate([to_float32(tensor) for tensor in tensors])
    return HostTensor(name=name, dtype="float32", shape=values.shape, data=values)


def _by_part(loaded: LoadedParam) -> list[Sequence[HostTensor]]:
    """The tensors of each part of a fused parameter, which may be stored whole."""
    parts = loaded.param.parts
    if len(loaded.tensors) == len(parts):
        return [[tensor] for tensor in loaded.tensors]
    [whole] = loaded.tensors
    values, start = to_float32(whole), 0
    pieces: list[Sequence[HostTensor]] = []
    for part in parts:
        cut = values[start : start + part.rows]
        pieces.append([HostTensor(name=part.name, dtype="float32", shape=cut.shape, data=cut, file=whole.file)])
        start += part.rows
    return pieces


def _live_bytes(device: Any) -> int:
    """What this process's arrays take on one device."""
    arrays = jax.live_arrays()
    shards = (shard for array in arrays for shard in array.addressable_shards)
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


@contextmanager
def _errors(what: str) -> Iterator[None]:
    """Turn the runtime's errors into OutOfMemory and DeviceLost; others go on."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
            raise OutOfMemory(f"the device has no memory left for {what}: {text.splitlines()[0]}") from error
        if text.startswith(_LOST):
            raise DeviceLost(f"the device stopped working: {text.splitlines()[0]}") from error
        raise
    except MemoryError as error:
        raise OutOfMemory(f"this machine has no memory left for {what}") from error
