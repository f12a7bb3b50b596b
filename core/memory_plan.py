"""What a model needs and whether it fits, from its config alone: no weight is loaded or downloaded for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from .config import DTYPES, KV_DTYPES, EngineConfig
from .engine.adapters import check_ranks, without_adapters
from .engine.build import Model, describe_model, model_bytes
from .engine.resolve import (
    image_bytes,
    resolve_capacity,
    resolve_dtype,
    resolve_gaps,
    resolve_runner,
)
from .errors import CapacityError
from .hub import LocalModel, resolve_config
from .kv.sizing import request_bytes
from .models.declare import declare_params
from .platform import Caps, Device, KVPlan, Memory, RunnerConfig
from .units import format_bytes
from .weights.quantize import Scheme, packed_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a model would run. device: None for memory that is only described, on a machine that is not here."""

    name: str
    memory: Memory
    caps: Caps = field(default_factory=lambda: Caps(dtypes=DTYPES, kv_dtypes=KV_DTYPES, schemes=("int8", "int4")))
    device: Device | None = None

    def packed_bytes(self, shape: tuple[int, ...], format: str | Scheme) -> int:
        """Bytes of a weight: what the device says, or without padding."""
        return packed_bytes(shape, format) if self.device is None else self.device.packed_bytes(shape, format)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """KV of one group of layers. token_bytes (0: a block is a state) and block_bytes: of all its layers.

    num_blocks: 0 if nothing fits.
    """

    kind: str
    window: int
    num_layers: int
    token_bytes: int
    block_bytes: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The memory table of one model on one target. Sizes in bytes.

    read_bytes: weights that one decode step reads. step_bytes: activations of the largest step, if they are allocated
    once. request_bytes: KV of one request of max_model_len tokens.
    concurrency: such requests that fit at once. problem: why it does not fit, or "".
    """

    model: str
    model_type: str
    num_layers: int
    num_params: int
    target: str
    dtype: str
    dtype_reason: str
    quantize: str
    kv_dtype: str
    weights_bytes: int
    read_bytes: int
    max_model_len: int
    block_size: int
    groups: tuple[GroupPlan, ...]
    request_bytes: int
    kv_bytes: int
    step_bytes: int
    concurrency: float
    max_num_seqs: int
    free_bytes: int
    total_bytes: int
    problem: str = ""
    remedies: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """True if the weights and at least one request fit."""
        return not self.problem

    def max_decode_tokens_per_s(self, bandwidth_bytes_per_s: float) -> float:
        """Tokens/s of a single stream if reading the weights were all the work."""
        return bandwidth_bytes_per_s / self.read_bytes


def plan_model(config: EngineConfig, target: Target, report: Callable[[str], None]) -> MemoryPlan:
    """Plan the model of `config`; a hub model's config (not its weights) is fetched if it is not here."""
    return plan_local(config, resolve_config(config.model, report), target)


def plan_local(config: EngineConfig, files: LocalModel, target: Target) -> MemoryPlan:
    """Plan a model whose config is on this disk. Raises ModelError, ConfigError or Unsupported."""
    local = replace(config, model=replace(config.model, model=str(files.path)))
    reads_images = target.device is None or "images" in target.caps.features
    model = describe_model(local, lambda line: None, with_images=reads_images)
    try:
        return _plan(config, replace(model, name=files.name), target)
    finally:
        if model.gguf is not None:
            model.gguf.close()


def device_target(device: Device) -> Target:
    """An opened device as it is now."""
    info = device.info
    return Target(name=f"{info.id} ({info.name})", memory=device.memory(), caps=device.caps, device=device)


def _plan(config: EngineConfig, model: Model, target: Target) -> MemoryPlan:
    spec = model.spec
    if target.device is not None:
        resolve_gaps(target.device, spec)
        check_ranks(spec, target.device.tp_size)
    dtype = resolve_dtype(config.model.dtype, spec, target.caps, blocked=model.gguf is not None)
    runner_config = resolve_runner(config, spec, target.caps, dtype.value)
    config, length = runner_config.engine, runner_config.max_model_len
    groups, kv = runner_config.groups, _kv_plan(runner_config, target)
    weights, looked_up = model_bytes(model, config, dtype.value, target.caps, target.packed_bytes)
    num_blocks: Sequence[int] = [0] * len(groups)
    kv_bytes, concurrency, problem = 0, 0.0, ""
    remedies: tuple[str, ...] = ()
    try:
        if weights > target.memory.free_bytes:
            raise CapacityError(
                f"{model.name} does not fit on {target.name}: weights {format_bytes(weights)} ({dtype.value}); "
                f"{format_bytes(target.memory.free_bytes)} free"
            )
        capacity = resolve_capacity(
            config,
            spec,
            groups,
            kv,
            target.memory,
            caps=target.caps,
            name=f"{model.name} on {target.name}",
            needed_bytes=weights + image_bytes(runner_config),
        )
        length, kv_bytes, concurrency = capacity.max_model_len, capacity.kv.total_bytes, capacity.kv.num_full_length
        num_blocks = capacity.kv.num_blocks
    except CapacityError as error:
        problem, remedies = error.reason, error.remedies
    return MemoryPlan(
        model=model.name,
        model_type=spec.model_type,
        num_layers=spec.num_layers,
        num_params=sum(p.num_elements for p in declare_params(without_adapters(spec)) if p.kind != "constant"),
        target=target.name,
        dtype=dtype.value,
        dtype_reason=dtype.reason,
        quantize=config.model.quantize,
        kv_dtype=dtype.value if config.kv.kv_dtype == "auto" else config.kv.kv_dtype,
        weights_bytes=weights,
        read_bytes=weights - looked_up,
        max_model_len=length,
        block_size=kv.block_size,
        groups=tuple(
            GroupPlan(
                kind=group.kind,
                window=group.window,
                num_layers=len(group.layer_indices),
                token_bytes=0 if group.kind == "state" else size // kv.block_size,
                block_bytes=size,
                num_blocks=count,
            )
            for group, size, count in zip(groups, kv.block_bytes, num_blocks, strict=True)
        ),
        request_bytes=request_bytes(groups, kv, length, config.scheduler.budget),
        kv_bytes=kv_bytes,
        step_bytes=kv.step_bytes,
        concurrency=concurrency,
        max_num_seqs=config.scheduler.max_num_seqs,
        free_bytes=target.memory.free_bytes,
        total_bytes=target.memory.total_bytes,
        problem=problem,
        remedies=remedies,
    )


def _kv_plan(config: RunnerConfig, target: Target) -> KVPlan:
    """What the device's runner says of its KV blocks; without a device, plain arrays."""
    if target.device is None:
        sizes = tuple(group.block_bytes(config.block_size, config.dtype, config.kv_dtype) for group in config.groups)
        return KVPlan(block_size=config.block_size, block_bytes=sizes)
    runner = target.device.runner(config)
    try:
        return runner.kv_plan()
    finally:
        runner.close()
