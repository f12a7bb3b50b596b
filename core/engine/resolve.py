"""Decisions that are made once, at start, each with its reason: dtype, length, KV memory."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ..config import DEFAULT_STEP_TOKENS, EngineConfig, parse_speculative
from ..errors import CapacityError, ConfigError, ModelError, Unsupported, WeightError
from ..kv.groups import KVGroup, kv_groups
from ..kv.sizing import KVSize, request_bytes, size_kv
from ..models.declare import declare_params
from ..models.heads import computes_in_one_step
from ..models.needs import model_needs
from ..models.params import Param
from ..models.spec import ModelSpec
from ..platform import Caps, Device, Gap, KVPlan, Memory, RunnerConfig
from ..runner.caches import image_row_size
from ..runner.sharding import rank_params
from ..units import format_bytes, parse_bytes
from ..weights.quantize import Scheme, schemes_of
from ..weights.source import DTYPE_BYTES, TensorInfo

SHARED_MEMORY_SHARE = 0.25
OWN_MEMORY_SHARE = 0.92
"""Of what is free after the weights, the part that kv_memory=auto may take: other programs share a host's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A resolved value and why it was chosen; the start log prints them."""

    name: str
    value: str
    reason: str = ""


def resolve_dtype(wanted: str, spec: ModelSpec, caps: Caps, *, blocked: bool) -> Choice:
    """The dtype of weights and activations. `blocked`: the checkpoint holds GGUF blocks, which have none."""
    if wanted != "auto":
        if wanted not in caps.dtypes:
            raise Unsupported(
                f"the device has no {wanted}; it has {', '.join(caps.dtypes)}",
                remedies=[f"--dtype {caps.dtypes[0]}", "--dtype auto"],
            )
        return Choice(name="dtype", value=wanted, reason="asked for")
    if blocked:
        fate = "stay as they are where the device can" if caps.schemes else "are dequantized"
        return Choice(name="dtype", value=caps.dtypes[0], reason=f"what the device is best at; GGUF blocks {fate}")
    if spec.dtype in caps.dtypes:
        return Choice(name="dtype", value=spec.dtype, reason="the checkpoint's own")
    return Choice(
        name="dtype", value=caps.dtypes[0], reason=f"the checkpoint has {spec.dtype}, which the device has not"
    )


def resolve_kv_dtype(wanted: str, caps: Caps) -> str:
    """What the KV cache holds: "" for activations' dtype. Raises Unsupported."""
    if wanted == "auto":
        return ""
    if wanted not in caps.kv_dtypes:
        others = (
            f"it has {', '.join(caps.kv_dtypes)}" if caps.kv_dtypes else "its caches hold activations' dtype only"
        )
        raise Unsupported(
            f"the device has no KV cache of {wanted}; {others}",
            remedies=["without --kv-dtype", "--device cpu"],
        )
    return wanted


def resolve_gaps(device: Device, spec: ModelSpec) -> list[Gap]:
    """Ask the device what it cannot do for this model. Raises Unsupported for the first error."""
    gaps = device.check(model_needs(spec))
    for gap in gaps:
        if gap.effect == "error":
            raise Unsupported(
                f"{device.info.id} cannot run this model: {gap.reason}", remedies=[gap.remedy] if gap.remedy else []
            )
    return gaps


def foreign_gaps(spec: ModelSpec, tp_size: int) -> list[Gap]:
    """What a model of no family goes without. Raises Unsupported over several devices."""
    if spec.foreign is None:
        return []
    if tp_size > 1:
        raise Unsupported(
            f"{spec.model_type} is of no family, and transformers' own code is not cut over {tp_size} devices",
            remedies=["--tensor-parallel-size 1", "take a model of a family in docs/models.md"],
        )
    reason = f"{spec.model_type} runs transformers' own code with paged attention; it is not one of the families"
    return [Gap(feature="foreign_code", reason=reason, effect="slow", remedy="a model of a family in docs/models.md")]


_MAX_ELEMENTS = 2**48  # bytes of so many stay far within 64 bits

PackedBytes = Callable[[tuple[int, ...], str | Scheme], int]
"""Device.packed_bytes."""


def param_bytes(
    spec: ModelSpec,
    dtype: str,
    quantization: str,
    caps: Caps,
    packed_bytes: PackedBytes,
    *,
    tp_size: int = 1,
    kept: Callable[[Param], Scheme | None] = lambda param: None,
) -> dict[str, int]:
    """Bytes of each parameter on all ranks, in `dtype` where no scheme of the device says otherwise; vectors and
    constants are float32. kept: what a checkpoint that was quantized before leaves a parameter in. Raises ModelError
    for a parameter of more elements than any device has bytes, as a damaged config declares."""
    sizes: dict[str, int] = {}
    shares = rank_params(spec, tp_size) if tp_size > 1 else {}
    for param in declare_params(spec):
        if param.num_elements > _MAX_ELEMENTS:
            raise ModelError(
                f"the config declares the parameter {param.name} of shape {list(param.shape)}; no parameter has more "
                f"than {_MAX_ELEMENTS} elements",
                remedies=["compare the sizes in config.json with the original's"],
            )
        schemes = schemes_of(param, quantization, caps)
        if quantization == "none" and (scheme := kept(param)) is not None:
            schemes = ((param.shape[0], scheme),)
        has_kernels = schemes and all(scheme.name in caps.schemes for _, scheme in schemes)
        if param.kind not in ("linear", "embedding", "stacked"):
            sizes[param.name] = 4 * param.num_elements
        elif has_kernels and (param.kind != "stacked" or caps.packs_experts):
            sizes[param.name] = sum(packed_bytes((rows, *param.shape[1:]), scheme) for rows, scheme in schemes)
        else:
            sizes[param.name] = packed_bytes(param.shape, dtype)
        if param.name in shares:
            whole, own = shares[param.name]
            sizes[param.name] = sizes[param.name] * own.num_elements * tp_size // whole.num_elements
    return sizes


def stored_bytes(tensors: Iterable[TensorInfo], dtype: str, caps: Caps, packed_bytes: PackedBytes) -> dict[str, int]:
    """Bytes of each tensor of a GGUF file on a device that keeps the block types of its schemes.

    Raises WeightError for a matrix without numbers.
    """
    sizes: dict[str, int] = {}
    for tensor in tensors:
        if len(tensor.shape) < 2:
            sizes[tensor.name] = 4 * math.prod(tensor.shape)
            continue
        if 0 in tensor.shape:
            raise WeightError(
                f"{tensor.file}: tensor {tensor.name} of shape {list(tensor.shape)} holds no number",
                file=tensor.file,
                tensor=tensor.name,
            )
        sizes[tensor.name] = packed_bytes(tensor.shape, tensor.dtype if tensor.dtype in caps.schemes else dtype)
    return sizes


def quantization_gaps(spec: ModelSpec, quantization: str, caps: Caps) -> list[Gap]:
    """What a device does not do for weights that are quantized on load."""
    if quantization == "none":
        return []
    name = quantization.partition("-")[0]
    if name in caps.schemes:
        if caps.packs_experts or all(layer.moe is None for layer in spec.layers):
            return []
        reason = f"there are no kernels for experts in {name}: they are rounded to it and kept in full size"
        return [Gap(feature=name, reason=reason, effect="slow", remedy="without --quantize")]
    reason = f"the device has no kernels for {name}: weights are rounded to it and kept in full size"
    return [Gap(feature=name, reason=reason, effect="slow", remedy="without --quantize")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """How long a request may be and how many KV blocks there are, and why."""

    max_model_len: int
    kv: KVSize
    reason: str


def resolve_length(config: EngineConfig, spec: ModelSpec) -> int:
    """The longest request that the model allows and the settings ask for."""
    wanted, limit = config.model.max_model_len, spec.max_position_embeddings
    if wanted == "auto":
        return limit
    if wanted > limit:
        raise ConfigError(
            f"max_model_len {wanted} is more than the {limit} positions that the model was made for",
            remedies=[f"--max-model-len {limit}"],
        )
    return wanted


def resolve_budget(config: EngineConfig, spec: ModelSpec, caps: Caps, length: int) -> EngineConfig:
    """The settings with the tokens of one step as a number, which holds the longest request if the model computes
    requests in one step."""
    scheduler, budget = config.scheduler, config.scheduler.max_num_batched_tokens
    if budget == "auto":
        budget = max(caps.step_tokens, scheduler.max_num_seqs)
    sees_all = spec.vision is not None and spec.vision.sight == "prompt"
    if sees_all or computes_in_one_step(spec):
        budget = max(budget, length)
    return replace(config, scheduler=replace(scheduler, max_num_batched_tokens=budget))


def _remedies(longest: int, plan: KVPlan, free: int, config: EngineConfig) -> list[str]:
    """What makes room. longest: tokens of a request that fit; free: bytes beside the weights and a step."""
    if longest >= plan.block_size:
        return [f"--max-model-len {longest}"]
    budget = config.scheduler.budget
    if free <= 0 < free + plan.step_bytes and budget > DEFAULT_STEP_TOKENS:
        return [f"--max-num-batched-tokens {DEFAULT_STEP_TOKENS} (it is {budget})"]
    return ["a smaller model"]


def resolve_capacity(
    config: EngineConfig,
    spec: ModelSpec,
    groups: Sequence[KVGroup],
    plan: KVPlan,
    memory: Memory,
    *,
    caps: Caps,
    name: str,
    needed_bytes: int,
) -> Capacity:
    """Size the KV cache. `needed_bytes`: weights that are not on the device yet.

    auto length shrinks to what fits, down to one block; an explicit length or size that does not fit is a
    CapacityError with all numbers.
    """
    scheduler = config.scheduler
    length = resolve_length(config, spec)
    free = memory.free_bytes - needed_bytes - plan.step_bytes
    if config.kv.kv_memory == "auto":
        available = int(free * (SHARED_MEMORY_SHARE if caps.shared_memory else OWN_MEMORY_SHARE))
        reason = f"auto: of {format_bytes(max(free, 0))} free beside the weights"
        if 0 < caps.auto_kv_bytes < available:
            available = caps.auto_kv_bytes
            reason = f"auto: this device takes {format_bytes(available)}, unless --kv-memory says otherwise"
    else:
        available = parse_bytes(config.kv.kv_memory, name="kv_memory")
        reason = "asked for"
        if available > free:
            raise CapacityError(
                f"{name} does not fit: weights {format_bytes(needed_bytes)} + KV {format_bytes(available)} "
                f"(asked for){_step(plan)}; {format_bytes(memory.free_bytes)} free",
                remedies=["--kv-memory auto"],
            )

    def fits(num_tokens: int) -> bool:
        each = request_bytes(groups, plan, num_tokens, scheduler.budget)
        return each + sum(plan.block_bytes) <= available

    if not fits(length):
        longest = _longest(fits, length)
        each = request_bytes(groups, plan, length, scheduler.budget)
        if config.model.max_model_len != "auto" or longest < plan.block_size:
            raise CapacityError(
                f"{name} does not fit with requests of {length} tokens: weights {format_bytes(needed_bytes)} + KV "
                f"{format_bytes(each)} for one{_step(plan)}; {format_bytes(memory.free_bytes)} free, "
                f"{format_bytes(max(available, 0))} of it for the KV cache",
                remedies=_remedies(longest, plan, free, config),
            )
        length, reason = longest, f"{reason}; shortened from {length}"
    kv = size_kv(
        available,
        groups,
        plan,
        max_model_len=length,
        max_num_batched_tokens=scheduler.budget,
        max_num_seqs=scheduler.max_num_seqs,
    )
    return Capacity(max_model_len=length, kv=kv, reason=reason)


def resolve_runner(config: EngineConfig, spec: ModelSpec, caps: Caps, dtype: str) -> RunnerConfig:
    """What a runner is asked for before the memory is known; its `engine` is the configuration with the budget of a
    step. Raises as those of its parts do."""
    length = resolve_length(config, spec)
    config = resolve_budget(config, spec, caps, length)
    _, num_draft_tokens = parse_speculative(config.scheduler.speculative)
    return RunnerConfig(
        spec=spec,
        dtype=dtype,
        groups=kv_groups(spec, length, num_draft_tokens),
        block_size=resolve_block_size(config.kv.block_size, caps),
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.budget,
        max_model_len=length,
        engine=config,
        kv_dtype=resolve_kv_dtype(config.kv.kv_dtype, caps),
        num_image_rows=resolve_image_rows(config, spec, length),
        num_draft_tokens=num_draft_tokens,
    )


def resolve_image_rows(config: EngineConfig, spec: ModelSpec, length: int) -> int:
    """Rows that are kept of images, those of the null block included: no more than two requests can have."""
    if spec.vision is None or spec.vision.is_crossed:
        return 0
    size = config.kv.block_size
    return (1 + -(-min(config.kv.image_cache_tokens, 2 * length) // size)) * size


def image_bytes(config: RunnerConfig) -> int:
    """Bytes of the rows that are kept of images."""
    return config.num_image_rows * image_row_size(config.spec) * DTYPE_BYTES[config.dtype]


def resolve_block_size(wanted: int, caps: Caps) -> int:
    """The KV block size, if the device's kernels take it."""
    if caps.block_sizes and wanted not in caps.block_sizes:
        sizes: Sequence[int] = caps.block_sizes
        raise Unsupported(
            f"the device has no kernels for KV blocks of {wanted} tokens; it takes {', '.join(map(str, sizes))}",
            remedies=[f"HEADRACE_BLOCK_SIZE={sizes[0]}"],
        )
    return wanted


def _step(plan: KVPlan) -> str:
    return f" + activations {format_bytes(plan.step_bytes)}" if plan.step_bytes else ""


def _longest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest length up to `limit` that fits, 0 if none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
