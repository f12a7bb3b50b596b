"""The measurements of `headrace bench ops`: every op that a model's forward function calls, timed by itself.

The forward function runs once a load on the device's own op table, which notes each call; then each different call is
repeated with the arrays that it had, going round the layers' weights and caches as a step does.
"""

import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..config import EngineConfig
from ..devices import open_device
from ..engine.build import Model, describe_model, load_params
from ..engine.resolve import resolve_block_size, resolve_dtype, resolve_kv_dtype
from ..errors import ConfigError, Unsupported
from ..json_text import parse_json
from ..kv.groups import kv_groups
from ..models.decoder import compute_logits, decoder
from ..ops import OpTable, op_names
from ..ops.attention import first_seen
from ..platform import Device, Runner, RunnerConfig
from ..runner.caches import new_caches
from ..runner.params import put_param
from ..self_test import place_of
from ..stages import ForwardBatch
from ..suggest import did_you_mean
from ..weights.quantize import schemes_of
from ..weights.source import DTYPE_BYTES, LoadedParam, ParamSource

_logger = logging.getLogger(__name__)

_SETUP = ("pack_linear", "pack_stacked", "new_kv_cache", "new_state", "upload", "to_device", "to_host")
"""Ops of loading, and of the border to the host."""
_VIEWS = ("split", "split_heads", "merge_heads")
"""Ops that need not move anything."""
_BY_TOKEN = ("grouped_experts", "absorb_keys", "expand_values")
"""Ops whose work depends on what tokens hold, or on weights that they read in part."""
_FLOP_PER_VALUE = {
    "rms_norm": 4,
    "add_rms_norm": 2.5,
    "layer_norm": 6,
    "rope": 3,
    "add": 1,
    "mul": 1,
    "scale": 1,
    "softcap": 3,
    "act": 4,
    "act_mul": 5,
    "gate": 4,
    "sample": 0,
}
"""Nominal operations for each value of the results (each logit, of `sample` comparisons: none), a function as one."""
_MIN_ROUND_S = 1e-3
_LEAST_SHARE = 0.02
"""Of what was timed, that must be the op's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A step: num_seqs requests of num_tokens tokens each, behind `context` tokens that are in the cache."""

    num_seqs: int
    num_tokens: int
    context: int = 0

    def __post_init__(self) -> None:
        for name in ("num_seqs", "num_tokens", "context"):
            if type(getattr(self, name)) is not int:
                raise TypeError(f"{name} must be a whole number, got {getattr(self, name)!r}")

    @property
    def name(self) -> str:
        """As tables show it."""
        if self.num_tokens == 1:
            return f"decode {self.num_seqs} at {self.context}"
        behind = f" at {self.context}" if self.context else ""
        return f"prefill {self.num_tokens}{behind}" + (f" x {self.num_seqs}" if self.num_seqs > 1 else "")


LOADS = (
    Load(num_seqs=1, num_tokens=1, context=512),
    Load(num_seqs=1, num_tokens=1, context=4096),
    Load(num_seqs=8, num_tokens=1, context=512),
    Load(num_seqs=1, num_tokens=512),
    Load(num_seqs=1, num_tokens=2048),
)


def usual_loads(longest: int) -> tuple[Load, ...]:
    """Those of LOADS that a model of so many positions takes; of very short ones a decode and a prompt."""
    fitting = tuple(load for load in LOADS if load.context + load.num_tokens <= longest)
    short = max(1, longest // 2)
    return fitting or (Load(num_seqs=1, num_tokens=1, context=short - 1), Load(num_seqs=1, num_tokens=short))


def read_loads(path: Path) -> tuple[Load, ...]:
    """Loads of a file: a JSON list of {"num_seqs", "num_tokens", "context"}. Raises ConfigError."""
    try:
        loads = tuple(Load(**entry) for entry in parse_json(path.read_bytes()))
        if not loads or any(min(x.num_seqs, x.num_tokens) < 1 or x.context < 0 for x in loads):
            raise ValueError("a load has at least one sequence and one token")
    except OSError as error:
        raise ConfigError(f"cannot read the shapes {path}: {error.strerror}") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} holds no shapes: {error}", remedies=['[{"num_seqs": 8, "num_tokens": 1, "context": 1024}]']
        ) from None
    return loads


def measure_ops(
    config: EngineConfig, *, loads: Sequence[Load], wanted: Sequence[str], min_time_s: float
) -> dict[str, Any]:
    """Every op of the table, or the wanted ones: a row for each different call, and why others have none.

    loads: empty for the usual ones. Raises ConfigError for unknown ops and for loads that are too long, Unsupported
    without a table of ops.
    """
    from headrace import __version__

    for name in wanted:
        if name not in op_names():
            raise ConfigError(f"there is no op {name}{did_you_mean(name, op_names())}")
    model = describe_model(config, _logger.info)
    loads = loads or usual_loads(model.spec.max_position_embeddings)
    device = open_device(config)
    try:
        with_model = _open(config, model, device, loads)
        try:
            rows, without = _measure(with_model, loads, set(wanted or op_names()), min_time_s)
        finally:
            with_model.runner.close()
        return {
            "headrace": __version__,
            "model": model.name,
            "device": device.info.id,
            "name": device.info.name,
            "dtype": with_model.config.dtype,
            "quantize": config.model.quantize,
            **device.describe(),
            "ops": rows,
            "not_timed": without,
        }
    finally:
        device.close()


# ---- the model on the table ---------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """A model whose parameters lie on a device. weight_bytes: by id of the parameter."""

    config: RunnerConfig
    runner: Runner
    ops: OpTable
    place: Any
    params: Mapping[str, Any]
    weight_bytes: Mapping[int, int]


def _open(config: EngineConfig, model: Model, device: Device, loads: Sequence[Load]) -> _Subject:
    spec = model.spec
    if spec.kind != "decoder":
        raise Unsupported(f"ops are timed in the forward pass of decoders, and {model.name} is an {spec.kind}")
    longest = max(load.context + load.num_tokens for load in loads)
    if longest > spec.max_position_embeddings:
        names = ", ".join(
            load.name for load in loads if load.context + load.num_tokens > spec.max_position_embeddings
        )
        raise ConfigError(f"{names}: more tokens than the {spec.max_position_embeddings} that {model.name} takes")
    dtype = resolve_dtype(config.model.dtype, spec, device.caps, blocked=model.gguf is not None).value
    runner_config = RunnerConfig(
        spec=spec,
        dtype=dtype,
        groups=kv_groups(spec, longest),
        block_size=resolve_block_size(config.kv.block_size, device.caps),
        max_num_seqs=max(load.num_seqs for load in loads),
        max_num_batched_tokens=max(load.num_seqs * load.num_tokens for load in loads),
        max_model_len=longest,
        engine=config,
        kv_dtype=resolve_kv_dtype(config.kv.kv_dtype, device.caps),
    )
    runner = device.runner(runner_config)
    if runner.ops is None:
        runner.close()
        raise Unsupported(f"the runner of {device.info.id} brings everything itself; there is no table of ops")
    ops, place = runner.ops, place_of(device)
    params: dict[str, Any] = {}
    weight_bytes: dict[int, int] = {}

    def put(source: ParamSource) -> None:
        for loaded in source:
            name = loaded.param.name
            params[name] = put_param(ops, loaded, dtype=dtype, device=place)
            weight_bytes[id(params[name])] = _stored_bytes(loaded, config, device, dtype)

    load_params(config, model, dtype, put, device)
    return _Subject(
        config=runner_config, runner=runner, ops=ops, place=place, params=params, weight_bytes=weight_bytes
    )


def _stored_bytes(loaded: LoadedParam, config: EngineConfig, device: Device, dtype: str) -> int:
    """Bytes of a parameter on the device: blocks and integers stay if it has kernels for them."""
    param = loaded.param
    if param.kind not in ("linear", "embedding", "stacked"):
        return math.prod(param.shape) * 4
    schemes = schemes_of(param, config.model.quantize, device.caps)
    if schemes and all(scheme.name in device.caps.schemes for _, scheme in schemes):
        return sum(device.packed_bytes((rows, *param.shape[1:]), scheme) for rows, scheme in schemes)
    keeps = config.model.dtype == "auto" and config.model.quantize == "none"
    return sum(
        device.packed_bytes(tensor.shape, tensor.dtype if keeps and tensor.dtype in device.caps.schemes else dtype)
        for tensor in loaded.tensors
    )


def _batch(subject: _Subject, load: Load) -> ForwardBatch:
    """A step of the load; requests own blocks one after another. States begin anew and are kept nowhere."""
    put, config = subject.ops.to_device, subject.config
    seqs = np.arange(load.num_seqs, dtype=np.int32)
    seq_len = load.context + load.num_tokens
    width = -(-seq_len // config.block_size)
    table = 1 + seqs[:, None] * width + np.arange(width, dtype=np.int32)
    span = np.arange(load.context, seq_len, dtype=np.int32)
    slots = (table[:, span // config.block_size] * config.block_size + span % config.block_size).reshape(-1)
    starts = np.arange(load.num_seqs + 1, dtype=np.int32) * load.num_tokens
    positions = np.tile(span, load.num_seqs)
    has_state = [group.kind == "state" for group in config.groups]
    return ForwardBatch(
        input_ids=put((np.arange(len(positions)) * 7919 % config.spec.vocab_size).astype(np.int32)),
        positions=put(positions),
        query_start_loc=put(starts.astype(np.int32)),
        seq_lens=put(np.full(load.num_seqs, seq_len, np.int32)),
        block_tables=[put(np.full_like(table, -1) if state else table.astype(np.int32)) for state in has_state],
        slot_mappings=[put(np.full_like(slots, -1) if state else slots.astype(np.int32)) for state in has_state],
        logits_indices=put((starts[1:] - 1).astype(np.int32)),
        max_query_len=load.num_tokens,
        max_seq_len=seq_len,
    )


# ---- noting calls -------------------------------------------------------------------------------------------
@dataclass(slots=True, kw_only=True)
class _Call:
    """A call of an op, as it was first made. variants: its arguments, once for each weight or cache it was made with;
    num_calls: how often a step makes it. value_bytes: of its arrays, results included."""

    op: str
    shape: str
    options: Mapping[str, Any]
    results: Sequence[Any]
    read: Sequence[Any]
    variants: list[list[Any]] = field(default_factory=list)
    num_calls: int = 0


class _Notes:
    """Calls of one step by op and shapes. `kept` holds the ids of what outlives the step: parameters and caches."""

    def __init__(self, ops: OpTable, kept: set[int]) -> None:
        self.calls: dict[tuple[Any, ...], _Call] = {}
        self.failed: dict[str, str] = {}
        self._ops, self._kept = ops, kept

    def table(self) -> OpTable:
        """The op table, noting."""
        return OpTable({name: partial(self._call, name) for name in op_names()})

    def _call(self, op: str, /, *arguments: Any, **options: Any) -> Any:
        try:
            results = getattr(self._ops, op)(*arguments, **options)
        except Unsupported as error:
            self.failed[op] = str(error)
            raise
        key = (op, *map(_signature, arguments), *sorted((name, _signature(value)) for name, value in options.items()))
        call = self.calls.get(key)
        if call is None:
            arrays = [argument for argument in arguments if _is_array(argument)]
            call = self.calls[key] = _Call(
                op=op,
                shape=" x ".join(_shape(argument) for argument in arguments if _shape(argument)),
                options=options,
                results=[_Sizes.of(result) for result in _leaves(results)],
                read=[_Sizes.of(array) for array in arrays if id(array) not in self._kept],
                variants=[list(arguments)],
            )
        elif any(id(argument) in self._kept for argument in arguments):
            # The arrays of one call serve all: those of every layer would not fit.
            call.variants.append(
                [a if id(a) in self._kept else b for a, b in zip(arguments, call.variants[0], strict=True)]
            )
        call.num_calls += 1
        return results


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The size of an array that need not be kept."""

    num_values: int
    num_bytes: int

    @classmethod
    def of(cls, array: Any) -> "_Sizes":
        """Of anything with a shape; nothing of what is opaque."""
        if not _is_array(array):
            return cls(0, 0)
        return cls(math.prod(array.shape), int(array.nbytes))


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "nbytes")


def _leaves(results: Any) -> list[Any]:
    return list(results) if isinstance(results, tuple | list) else [results]


def _packed_shape(value: Any) -> tuple[int, ...] | None:
    shape = getattr(value, "shape", getattr(getattr(value, "packed", None), "shape", None))
    return None if shape is None else tuple(shape)


def _signature(value: Any) -> str:
    shape = _packed_shape(value)
    if shape is not None:
        return f"{shape} {getattr(value, 'dtype', '')}"
    return repr(value) if isinstance(value, int | float | str | None | tuple) and not _has_arrays(value) else "opaque"


def _has_arrays(value: Any) -> bool:
    return isinstance(value, tuple) and any(_is_array(part) for part in value)


def _shape(value: Any) -> str:
    shape = _packed_shape(value)
    return "" if shape is None else f"[{', '.join(map(str, shape))}]"


def _note_step(subject: _Subject, load: Load) -> _Notes:
    config = subject.config
    width = -(-(load.context + load.num_tokens) // config.block_size)
    kv = new_caches(
        subject.ops,
        config.groups,
        [1 + load.num_seqs * width] * len(config.groups),
        num_layers=config.spec.num_layers,
        block_size=config.block_size,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        device=subject.place,
    )
    notes = _Notes(subject.ops, {*map(id, subject.params.values()), *map(id, kv.layers)})
    ops, batch = notes.table(), _batch(subject, load)
    try:
        hidden_states, _ = decoder(ops, config.spec, subject.params, kv, batch)
        logits = compute_logits(ops, config.spec, subject.params, ops.gather(hidden_states, batch.logits_indices))
        seeds = subject.ops.to_device(np.arange(load.num_seqs, dtype=np.int32))
        ops.sample(logits, seeds, seeds, None, None, None, None)
    except Unsupported as error:
        _logger.warning("the step ends early load=%r reason=%r", load.name, str(error))
    return notes


# ---- the clock ----------------------------------------------------------------------------------------------
def _measure(
    subject: _Subject, loads: Sequence[Load], wanted: set[str], min_time_s: float
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Rows of figures, and what has none: op, load ("" for all) and reason."""
    rows: list[dict[str, Any]] = []
    without: list[dict[str, str]] = []
    for load in loads:
        _logger.info("timing load=%r", load.name)
        notes = _note_step(subject, load)
        reasons = {op: reason for op, reason in notes.failed.items() if op in wanted}
        for call in notes.calls.values():
            if call.op not in wanted or call.op in _SETUP:
                continue
            seconds = _time(subject, call, min_time_s)
            if seconds is None:
                reasons[call.op] = f"lost beside reading its inputs, {call.shape}"
            else:
                rows.append(_row(subject, load, call, seconds))
        without += [{"op": op, "load": load.name, "reason": reason} for op, reason in reasons.items()]
    seen = {row["op"] for row in (*rows, *without)}
    for op in op_names():
        if op in wanted and op not in seen:
            loading = "runs when a model is loaded, or at the border to the host"
            reason = loading if op in _SETUP else "no step of this model calls it"
            without.append({"op": op, "load": "", "reason": reason})
    return rows, without


def _row(subject: _Subject, load: Load, call: _Call, seconds: float) -> dict[str, Any]:
    num_bytes, flop = _work(subject, load, call)
    return {
        "op": call.op,
        "load": load.name,
        "shape": call.shape,
        "calls": call.num_calls,
        "seconds": seconds,
        "bytes": num_bytes,
        "flop": flop,
        "gb_per_s": None if num_bytes is None else num_bytes / seconds / 1e9,
        "gflop_per_s": None if flop is None else flop / seconds / 1e9,
        "intensity": None if not flop or not num_bytes else flop / num_bytes,
    }


def _time(subject: _Subject, call: _Call, min_time_s: float) -> float | None:
    """Seconds of one call: a median over at least five rounds through all variants, less that of what is beside it,
    measured by turns; None if that leaves next to nothing."""
    prepared = [subject.runner.prepare_op(call.op, variant, call.options) for variant in call.variants]
    whole = [each.run for each in prepared]
    beside = [each.idle for each in prepared if each.idle is not None]

    def round_s(runs: Sequence[Callable[[], Any]], count: int) -> float:
        started_s = time.perf_counter()
        for _ in range(count):
            for run in runs:
                result = run()
        _wait(subject.ops, result)
        return (time.perf_counter() - started_s) / (count * len(runs))

    for runs in (whole, beside):
        if runs:
            round_s(runs, 1)  # memory is taken from the system as it is touched
    count = max(1, math.ceil(_MIN_ROUND_S / (max(round_s(whole, 1), 1e-9) * len(whole))))
    whole_s: list[float] = []
    beside_s: list[float] = []
    end_s = time.perf_counter() + min_time_s
    while len(whole_s) < 5 or time.perf_counter() < end_s:
        whole_s.append(round_s(whole, count))
        beside_s.append(round_s(beside, count) if beside else 0.0)
    seconds = statistics.median(whole_s)
    alone = seconds - statistics.median(beside_s)
    return alone if alone > _LEAST_SHARE * seconds else None


def _wait(ops: OpTable, result: Any) -> None:
    """Until a device has computed what it was asked for last: a row of it is fetched."""
    while isinstance(result, tuple | list):
        result = result[0]
    if _is_array(result) and not isinstance(result, np.ndarray):
        ops.to_host(ops.gather(result, ops.to_device(np.zeros(1, np.int32))))


def _work(subject: _Subject, load: Load, call: _Call) -> tuple[int | None, float | None]:
    """(bytes, flop) of a call: bytes that must be read and written once, nominal operations; None: not known."""
    read, results = (sum(sizes.num_bytes for sizes in part) for part in (call.read, call.results))
    written = sum(sizes.num_values for sizes in call.results)
    weights = sum(subject.weight_bytes.get(id(argument), 0) for argument in call.variants[0])
    if call.op == "linear":
        in_features = (_packed_shape(call.variants[0][1]) or (0,))[-1]
        return read + weights + results, 2 * written * in_features
    if call.op == "paged_attention":
        return _attention_work(subject, load, call)
    if call.op in ("embedding", "gather"):  # of what they read from, they take the rows that they write
        return 2 * results + call.read[-1].num_bytes, 0
    if call.op == "write_kv":
        return 2 * read, 0
    if call.op in _VIEWS or call.op in _BY_TOKEN:
        return None, None
    flop = _FLOP_PER_VALUE.get(call.op)
    return read + weights + results, None if flop is None else flop * written


def _attention_work(subject: _Subject, load: Load, call: _Call) -> tuple[int, float]:
    """Keys and values that queries see are read once; two products for each pair of query and key."""
    query = call.variants[0][0]
    num_heads, head_dim = query.shape[1:]
    window, chunk = (call.options.get(name, 0) for name in ("window", "chunk"))
    positions = range(load.context, load.context + load.num_tokens)
    firsts = [max(0, first_seen(position, window, chunk)) for position in positions]
    seen = [position + 1 - first for position, first in zip(positions, firsts, strict=True)]
    num_keys = load.context + load.num_tokens - firsts[0]
    kv_heads = next(
        layer.attn.num_kv_heads for layer in subject.config.spec.layers if layer.attn.num_heads == num_heads
    )
    kv_bytes = 2 * load.num_seqs * num_keys * kv_heads * head_dim * DTYPE_BYTES[subject.config.dtype]
    rows = 2 * load.num_seqs * load.num_tokens * num_heads * head_dim * DTYPE_BYTES[subject.config.dtype]
    return kv_bytes + rows, 4.0 * load.num_seqs * sum(seen) * num_heads * head_dim
