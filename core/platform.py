"""What a hardware plugin implements: manifest, probe, device, and either a runner or a table of ops.

Reading a manifest imports no vendor library. Argument objects are frozen and keyword-only: fields are only
added, always with defaults. There is no process-global "current platform".
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from .config import DEFAULT_STEP_TOKENS

if TYPE_CHECKING:
    from .config import EngineConfig
    from .kv.groups import KVGroup
    from .models.spec import ModelSpec
    from .ops.table import OpTable, Selection
    from .stages import StepInput, StepOutput
    from .weights.quantize import Quantizer, Scheme
    from .weights.source import ParamSource

API = (1, 0)
"""Version of this interface. A plugin of another major version, or of a newer minor one, is not loaded."""


# ---- manifest and probe: data ------------------------------------------------------------------------------
class Status(StrEnum):
    """What became of a platform."""

    OK = "ok"
    NO_DEVICE = "no device"
    MISSING = "missing package"
    INCOMPATIBLE = "incompatible plugin interface"
    BROKEN = "plugin failed to load"
    CRASHED = "probe crashed"
    TIMEOUT = "probe timed out"
    CONFLICT = "name conflict"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """One device. `id` is what --device takes: "cpu", or a platform and an index."""

    id: str
    name: str
    kind: Literal["cpu", "gpu", "accelerator"]
    total_bytes: int
    free_bytes: int
    arch: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a detection function found. `fix` is a command or setting that would help."""

    status: Status
    reason: str = ""
    fix: str = ""
    devices: tuple[DeviceInfo, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformSpec:
    """A platform's manifest.

    impl, detect: "package.module:name" of a Platform class and of a function () -> Probe; imported when used.
    priority: --device auto takes the usable platform with the highest; below 0 it is never taken by auto.
    device_nodes: glob patterns of device files; if none exists the probe is skipped with NO_DEVICE.
    light_probe: `detect` reads files with the standard library only, so it may run in the caller's process; a
    third party's runs in a child process whatever this says.
    """

    name: str
    impl: str
    detect: str
    api: tuple[int, int] = API
    priority: int = 50
    fix: str = ""
    device_nodes: tuple[str, ...] = ()
    light_probe: bool = False


# ---- capabilities and negotiation --------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """What a device can do; defaults are conservative."""

    array: Literal["torch", "jax", "opaque"] = "torch"
    dtypes: tuple[str, ...] = ("float32",)
    """usable dtypes; the first is what dtype=auto takes if the checkpoint's own is not among them"""
    kv_dtypes: tuple[str, ...] = ()
    """what a KV cache may hold instead of activations' dtype, such as "int8" (see ops.attention)"""
    schemes: tuple[str, ...] = ()
    """weight schemes with kernels of their own, such as "int8" or "q8_0"; others are dequantized, reported as slow"""
    packs_experts: bool = False
    """experts are held in these schemes, too"""
    depth: int = 0
    """steps that may be in flight before the first one's result is read"""
    capture: Literal["none", "graph", "compile", "tape"] = "none"
    shared_memory: bool = False
    """the device's memory is also that of other programs: auto takes a quarter of what is free, not all"""
    auto_kv_bytes: int = 0
    """what auto takes for the KV cache at most; 0: no limit"""
    bucketed: bool = False
    """the runner pads token and request counts to buckets"""
    step_tokens: int = DEFAULT_STEP_TOKENS
    """tokens of the largest step by default: as many as its kernels need to run at full speed"""
    block_sizes: tuple[int, ...] = ()
    """block sizes that the attention kernels take; empty: any"""
    features: frozenset[str] = frozenset()
    """names out of `models.needs`, such as "softcap" or "sliding_window" """


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Something that a model or a setting asks of a device; `why` names what asks."""

    feature: str
    why: str
    required: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A need that a device does not meet: an error, a slower way, or a feature switched off."""

    feature: str
    reason: str
    effect: Literal["error", "slow", "off"]
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on a device: all, free, and what this process uses."""

    total_bytes: int
    free_bytes: int
    used_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPlan:
    """A runner's answer to the KV groups: what one block of each group costs, all layers of this rank."""

    block_size: int
    block_bytes: tuple[int, ...]
    step_bytes: int = 0
    """of the memory for a step's activations, if it is allocated once for the largest step"""


# ---- ops that a platform brings ----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class OpContext:
    """What an op implementation may ask before it says that it can serve a model."""

    spec: "ModelSpec"
    dtype: str
    block_size: int
    kv_dtype: str = ""
    """of keys and values in the cache; empty: dtype"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpProvider:
    """Implementations of some ops by one source of kernels.

    ops: op name -> function with the signature of its declaration. declines: (op name, context) -> why this
    provider cannot serve it there, or "" if it can. Ops of one family that share a memory layout (see
    core/ops) are taken from one provider together or not at all. kv_dtypes: as in `Caps`; a provider without the
    asked one is not asked for the ops of the cache.
    """

    name: str
    priority: int = 50
    ops: Mapping[str, Callable[..., Any]]
    declines: Callable[[str, OpContext], str] = lambda op, context: ""
    kv_dtypes: tuple[str, ...] = ()


# ---- device and runner -------------------------------------------------------------------------------------
DRAFTING_REQUESTS = 8
"""Requests that may verify all drafts at the same time, however few may run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """All that a runner must know, resolved once by the engine."""

    spec: "ModelSpec"
    dtype: str
    groups: tuple["KVGroup", ...]
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    engine: "EngineConfig"
    kv_dtype: str = ""
    """of keys and values in the cache; empty: dtype"""
    num_image_rows: int = 0
    """rows that are kept of images, those of the null block included; 0 for a model that reads none"""
    num_draft_tokens: int = 0
    """drafts that a row verifies at most"""

    @property
    def max_num_samples(self) -> int:
        """Positions of one step that are sampled at most: one of each request, and drafts as far as that leaves
        room, or those of a few requests."""
        return max(self.max_num_seqs, DRAFTING_REQUESTS * (1 + self.num_draft_tokens) if self.num_draft_tokens else 0)

    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of one block of each group, in plain arrays."""
        return tuple(group.block_bytes(self.block_size, self.dtype, self.kv_dtype) for group in self.groups)


class Pending(Protocol):
    """A step that may still be running."""

    def ready(self) -> bool:
        """True if `result` would not wait."""
        ...

    def result(self) -> "StepOutput":
        """Wait for the step. Raises OutOfMemory or DeviceLost."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedOp:
    """One call of an op for a clock. run: the call; returns what it computes, or None if that is done by then.
    idle: all that `run` does beside the op, if that can be told apart."""

    run: Callable[[], Any]
    idle: Callable[[], Any] | None = None


class Runner(ABC):
    """One model on one rank: everything above talks to hardware through these methods only.

    numpy and plain Python at the border. Order of calls: load, kv_plan, kv_init, warmup, step*, close.
    """

    ops: "OpTable | None" = None
    """the op table of a stock runner; None for a runner that brings everything itself"""
    takes_late_masks: ClassVar[bool] = False
    """`step` waits for a SamplingBatch's LateArray when the forward pass is under way; without, `step` is called when
    the mask is there"""

    @property
    def num_programs(self) -> int | None:
        """Programs compiled or graphs recorded so far; None where a step is neither."""
        return None

    @property
    def op_selections(self) -> Sequence["Selection"]:
        """Which provider serves each op, and why others declined; empty without an op table."""
        return ()

    @abstractmethod
    def load(self, params: "ParamSource") -> None:
        """Take the declared parameters one by one; never hold two full copies."""

    def load_adapter(self, number: int, params: "ParamSource") -> None:
        """Put another adapter at a place of the stacks that `load` took; programs find it there. params: of each
        stack one matrix. Called between steps; those under way do not read the place."""
        raise NotImplementedError

    @abstractmethod
    def kv_plan(self) -> KVPlan:
        """What KV blocks cost on this device."""

    @abstractmethod
    def kv_init(self, num_blocks: Sequence[int]) -> None:
        """Allocate exactly this many blocks per group; block 0 is the null block. Raises OutOfMemory."""

    @abstractmethod
    def warmup(self) -> None:
        """Compile or capture. After it `step` may do neither."""

    @abstractmethod
    def step(self, batch: "StepInput") -> Pending:
        """Run one step. All KV of a layer is written before any attention of that layer reads."""

    @abstractmethod
    def memory(self) -> Memory:
        """Memory of the device now."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; may be called twice."""

    def collective(self, name: str, arrays: Sequence[Any]) -> Sequence[Any]:
        """What each rank gets of the collective `name` (all_reduce: sums; all_gather: [n, m] of all side by side),
        given what each has; numpy arrays."""
        raise NotImplementedError

    def prepare_op(self, op: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> PreparedOp:
        """A call of the op table's `op`, ready to be repeated. Raises Unsupported."""
        return PreparedOp(run=partial(getattr(self.ops, op), *arguments, **options))

    # Optional: canonical host layout is [n, layers, 2, block_size, num_kv_heads, head_dim].
    def read_blocks(self, group: int, block_ids: Sequence[int]) -> Any:
        """KV blocks of a group as a numpy array in the canonical layout."""
        raise NotImplementedError

    def write_blocks(self, group: int, block_ids: Sequence[int], data: Any) -> None:
        """The reverse of `read_blocks`."""
        raise NotImplementedError


class Device(ABC):
    """An opened device (or group of devices) in this process."""

    info: DeviceInfo
    caps: Caps
    extra_providers: tuple[OpProvider, ...] = ()
    """op providers that other plugins bring for this device; set once, when it has been opened"""

    @property
    def tp_size(self) -> int:
        """Ranks over which this device cuts the layers of a model."""
        return 1

    def check(self, needs: Sequence[Need]) -> list[Gap]:
        """Which needs this device does not meet; called before any weight is read.

        The default says that a device meets what its capabilities list.
        """
        return [
            Gap(
                feature=need.feature,
                reason=f"{need.why} needs {need.feature}",
                effect="error" if need.required else "off",
            )
            for need in needs
            if need.feature not in self.caps.features
        ]

    @abstractmethod
    def runner(self, config: RunnerConfig) -> Runner:
        """A runner for one model."""

    @abstractmethod
    def memory(self) -> Memory:
        """Memory of the device now."""

    def providers(self) -> Sequence[OpProvider]:
        """Op providers of this platform for this device; the definitions stand behind them."""
        return ()

    def packed_bytes(self, shape: tuple[int, ...], format: "str | Scheme") -> int:
        """Bytes that a weight [rows, cols] takes here: in a dtype, or in a block type or scheme of caps.schemes."""
        from .weights.quantize import packed_bytes

        return packed_bytes(shape, format)

    def quantizer(self) -> "Quantizer | None":
        """A faster form of weights.quantize.quantize_rows."""
        return None

    def describe(self) -> Mapping[str, str]:
        """What the start log says of this device: threads, instruction set and the like."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Release the device; may be called twice."""


class Platform(ABC):
    """A family of devices, opened in the process that will use them."""

    api: ClassVar[tuple[int, int]] = API

    @abstractmethod
    def open(self, ids: Sequence[str], config: "EngineConfig") -> Device:
        """Open devices by the ids after the colon in --device ([] for the default one).

        The vendor's stack is imported here. Raises DeviceUnavailable.
        """
