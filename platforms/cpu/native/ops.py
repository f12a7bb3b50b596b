"""The native records as a table of ops over numpy arrays: each call traces, lowers and runs a program of one op.

A model runs from its own program and never comes here; the conformance kit, `doctor` and `bench ops` reach through
this table what that program is made of. bfloat16 arrays are their bit patterns in uint16.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.errors import Unsupported
from headrace.core.ops import OpTable, Selection, op_names
from headrace.core.ops.table import DEFINITION
from headrace.core.platform import PreparedOp
from headrace.core.weights.dequantize import to_float32
from headrace.core.weights.source import HostTensor
from headrace.kernels.cpu import _ops

from .program import NativeProgram
from .sampling import sampling_ops
from .stacks import pack_stacks, readers_of
from .tracer import Tracer
from .values import CacheRef, InputRef, Instruction, ParamRef, RowsRef, StateRef, Trace, UntraceableOp, Value
from .weights import STORED_DTYPES, pack

Numpy = npt.NDArray[Any]

_NUM_VALUES = {
    "embedding": 0,
    "linear": 1,
    "route_experts": 1,
    "part_identities": 2,
    "grouped_experts": 3,
    "absorb_keys": 1,
    "expand_values": 1,
    "rms_norm": 1,
    "add_rms_norm": 2,
    "layer_norm": 1,
    "magnitude": 1,
    "rotary_angles": 0,
    "rope": 3,
    "write_kv": 2,
    "paged_attention": 1,
    "encoder_attention": 3,
    "place_rows": 1,
    "mean_rows": 1,
    "stack_rows": 1,
    "causal_conv": 1,
    "selective_scan": 4,
    "gated_delta": 5,
    "wkv": 2,
    "lru_inputs": 3,
    "add": 2,
    "scale": 1,
    "softcap": 1,
    "act": 1,
    "act_mul": 1,
    "gate": 2,
    "xielu": 1,
    "mul": 2,
    "clamp": 1,
    "log_growth": 0,
    "concat": 9,
    "cast": 1,
    "gather": 1,
}
"""Ops that are records, and how many of their first arrays are activations; arrays behind those are parameters, and
so is an array of one axis."""
_INPUTS = {
    "embedding": ("input_ids",),
    "rotary_angles": ("positions", "rope_rows"),
    "gather": ("logits_indices",),
    "log_growth": ("positions",),
    "lru_inputs": ("positions",),
    "causal_conv": ("query_start_loc", "block_tables", "slot_mappings"),
    "selective_scan": ("query_start_loc", "block_tables", "slot_mappings"),
    "gated_delta": ("query_start_loc", "block_tables", "slot_mappings"),
    "wkv": ("query_start_loc", "block_tables", "slot_mappings"),
    "write_kv": ("slot_mappings",),
    "paged_attention": ("query_start_loc", "seq_lens", "block_tables", "reach"),
    "place_rows": ("image_rows",),
    "encoder_attention": ("query_start_loc",),
    "mean_rows": ("starts", "ends"),
    "stack_rows": ("windows",),
}
"""What the int32 arrays of an op are in a batch, in order."""
_BY_TOKEN = ("input_ids", "positions", "rope_positions")
"""Arrays that say how many tokens there are, where no activation does."""
_STATES = {"causal_conv": 3, "selective_scan": 7, "gated_delta": 7, "wkv": 4}
"""Which argument of an op holds states."""


TORCH_OPS = ("store_rows",)
"""Ops without a native form, which few models need: an encoder of images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeStack:
    """A stacked weight, packed by the op that reads it."""

    tensors: Sequence[HostTensor]
    num_stacked: int
    dtype: str
    keep_blocks: bool

    def param(self, name: str) -> ParamRef:
        """A reference to it."""
        shape = sum(tensor.shape[0] for tensor in self.tensors), self.tensors[0].shape[1]
        return ParamRef(name=name, shape=shape, num_stacked=self.num_stacked)


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeWeight:
    """A packed weight, and the dtype in which `embedding` gives its rows."""

    packed: _ops.PackedWeight
    dtype: str
    rounds_x: bool


def native_ops(dtype: str, *, keep_blocks: bool) -> OpTable:
    """The ops for activations in `dtype`; those of TORCH_OPS raise Unsupported.

    keep_blocks: as for `weights.pack`.
    """
    table: dict[str, Callable[..., Any]] = {name: partial(_refuse, name) for name in TORCH_OPS}
    table |= {name: getattr(sampling_ops(), name) for name in _SAMPLING}
    table |= {name: partial(_run_op, name, dtype) for name in _NUM_VALUES}
    table |= {
        "pack_linear": partial(_pack_linear, keep_blocks=keep_blocks),
        "pack_stacked": partial(_pack_stacked, keep_blocks=keep_blocks),
        "new_kv_cache": _new_kv_cache,
        "new_state": _new_state,
        "gather": partial(_gather, dtype),
        "cast": partial(_cast, dtype),
        "split": lambda x, sizes: tuple(np.split(x, np.cumsum(sizes)[:-1], axis=-1)),
        "split_heads": lambda x, *, head_dim: x.reshape(len(x), x.shape[1] // head_dim, head_dim),
        "merge_heads": lambda x: x.reshape(len(x), x.shape[1] * x.shape[2]),
        "to_device": lambda array, *, device="cpu": array.copy(),
        "to_host": lambda array: array,
        "upload": _upload,
    }
    assert set(table) == set(op_names())
    return OpTable(table)


_SAMPLING = (
    "apply_token_mask",
    "add_logit_bias",
    "apply_penalties",
    "logprobs",
    "sample",
    "remember_tokens",
    "recall_tokens",
)


def prepare_native_op(dtype: str, op: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> PreparedOp | None:
    """A program of one op, ready to run, and one that only loads its activations; None for what is no record.

    Raises Unsupported.
    """
    if op not in _NUM_VALUES:
        return None
    if op == "gather":
        x, *rest = arguments
        arguments = [x.reshape(len(x), math.prod(x.shape[1:])), *rest]
    call, results = _trace_op(op, dtype, arguments, options)
    results = results if isinstance(results, tuple) else (results,)
    values = [result for result in results if isinstance(result, Value)]
    return PreparedOp(run=call.prepare(values)[1], idle=call.prepare_loads())


def native_selections(*, with_images: bool) -> tuple[Selection, ...]:
    """Who serves each op on this platform; those that only an encoder of images needs are there if there is one."""
    reason = "no native form; a model that needs this op runs in torch"
    return tuple(
        Selection(op=op, provider=DEFINITION, declined=(("native", reason),))
        if op in TORCH_OPS
        else Selection(op=op, provider="native")
        for op in op_names()
        if with_images or op not in TORCH_OPS
    )


def _refuse(op: str, /, *arguments: object, **options: object) -> None:
    raise Unsupported(f"op {op} has no native form; a model that needs it runs in torch")


def _pack_linear(tensors: Sequence[HostTensor], *, dtype: str, device: str, keep_blocks: bool) -> NativeWeight:
    packed, layout = pack(tensors, dtype, keep_blocks=keep_blocks)
    return NativeWeight(packed=packed, dtype=dtype, rounds_x=layout.rounds_x)


def _pack_stacked(
    tensors: Sequence[HostTensor], *, num_stacked: int, dtype: str, device: str, keep_blocks: bool
) -> NativeStack:
    return NativeStack(tensors=tensors, num_stacked=num_stacked, dtype=dtype, keep_blocks=keep_blocks)


def _new_state(*, num_slots: int, shape: tuple[int, ...], dtype: str, device: str) -> Numpy:
    return np.zeros((num_slots, *shape), STORED_DTYPES[dtype])


def _new_kv_cache(
    *, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: str, device: str
) -> _ops.KVCache:
    return _ops.KVCache(num_blocks, block_size, num_kv_heads, head_dim, dtype)


def _upload(tensor: HostTensor, *, dtype: str, device: str) -> Numpy:
    values = to_float32(tensor)
    if dtype == "float32":
        return values.copy()
    narrow: Numpy = _run_op("cast", "float32", values.reshape(math.prod(values.shape), 1), dtype=dtype)
    return narrow.reshape(values.shape)


def _cast(dtype: str, x: Numpy, /, **options: str) -> Numpy:
    if not x.size:  # a record has columns
        return np.zeros(x.shape, STORED_DTYPES[options["dtype"]])
    result: Numpy = _run_op("cast", dtype, x, **options)
    return result


def _gather(dtype: str, x: Numpy, indices: Numpy) -> Numpy:
    rows = _run_op("gather", dtype, x.reshape(len(x), math.prod(x.shape[1:])), indices)
    result: Numpy = rows.reshape(len(indices), *x.shape[1:])
    return result


def _run_op(op: str, dtype: str, /, *arguments: Any, **options: Any) -> Any:
    """What one op returns: a program that loads its activations and has its record runs, and is read."""
    call, results = _trace_op(op, dtype, arguments, options)
    if isinstance(results, CacheRef):
        call.run([])
        return arguments[0]
    if isinstance(results, Value):
        return call.run([results])[0]
    arrays = iter(call.run([result for result in results if isinstance(result, Value)]))
    return tuple(next(arrays) if isinstance(result, Value) else arguments[_STATES[op]] for result in results)


def _trace_op(op: str, dtype: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> "tuple[_Call, Any]":
    """A call that has been traced, and what the tracer returned. Raises Unsupported."""
    call = _Call(op, dtype)
    operands = [
        call.state(argument) if at == _STATES.get(op) else call.operand(argument)
        for at, argument in enumerate(arguments)
    ]
    named = {name: call.operand(value) for name, value in options.items()}
    try:
        return call, getattr(call.tracer, op)(*operands, **named)
    except UntraceableOp as error:
        raise Unsupported(str(error)) from error


class _Call:
    """The operands of one op as a tracer takes them, and the program that comes of it."""

    def __init__(self, op: str, dtype: str) -> None:
        self.tracer = Tracer(dtype)
        self._op, self._num_values = op, _NUM_VALUES[op]
        self._fields = iter(_INPUTS.get(op, ()))
        self._weights: dict[str, _ops.PackedWeight] = {}
        self._vectors: dict[str, npt.NDArray[np.float32]] = {}
        self._rounds_x: set[str] = set()
        self._caches: dict[CacheRef, _ops.KVCache] = {}
        self._states: dict[StateRef, Numpy] = {}
        self._stacks: dict[str, NativeStack] = {}
        self._batch: dict[str, npt.NDArray[np.int32]] = {}
        self._images: Numpy | None = None
        self._loaded: list[Value] = []
        self._num_rows: int | None = None

    def operand(self, argument: Any) -> Any:
        """An array, weight or cache as a reference; anything else as it is."""
        if isinstance(argument, NativeWeight):
            self._weights["weight"] = argument.packed
            if argument.rounds_x:
                self._rounds_x.add("weight")
            return ParamRef(name="weight", shape=argument.packed.shape)
        if isinstance(argument, _ops.KVCache):
            cache = CacheRef(layer=0)
            self._caches[cache] = argument
            return cache
        if isinstance(argument, NativeStack):
            name = f"stack {len(self._stacks)}"
            self._stacks[name] = argument
            return argument.param(name)
        if isinstance(argument, list | tuple):
            return tuple(self.operand(part) for part in argument)
        if not isinstance(argument, np.ndarray):
            return argument
        if argument.dtype == np.int32 and len(self._loaded) < self._num_values:
            return self._load(argument)
        if argument.dtype == np.int32:
            field = next(self._fields, "")
            if not field:
                raise Unsupported(f"op {self._op} has no native form with one of its arrays")
            if field == "positions" and argument.ndim == 2:
                field = "rope_positions"
            self._batch[field] = argument
            return InputRef(field=field, rows="logits", cols=argument.shape[1] if argument.ndim == 2 else 0)
        if len(self._loaded) < self._num_values and argument.ndim > 1:
            return self._load(argument)
        if self._op == "place_rows":
            self._images = np.ascontiguousarray(argument)
            return RowsRef(column=0, cols=argument.shape[1])
        name = f"vector {len(self._vectors)}"
        self._vectors[name] = argument
        return ParamRef(name=name, shape=argument.shape)

    def state(self, array: Numpy) -> StateRef:
        """States, which the op changes."""
        ref = StateRef(layer=0, index=len(self._states))
        self._states[ref] = array
        return ref

    def run(self, results: list[Value]) -> list[Numpy]:
        """Run the program and read values from it."""
        program, run = self.prepare(results)
        run()
        arrays = [program.read(value, self._num_rows_of(value)) for value in results]
        return [
            array.reshape(len(array), value.cols // value.head_dim, value.head_dim) if value.head_dim else array
            for array, value in zip(arrays, results, strict=True)
        ]

    def prepare(self, results: list[Value]) -> tuple[NativeProgram, Callable[[], None]]:
        """The program, and its run. Raises Unsupported."""
        return self._program(tuple(self.tracer.instructions), results or self._loaded)

    def prepare_loads(self) -> Callable[[], None] | None:
        """The run of a program that only loads the activations; None if there are none."""
        if not self._loaded:
            return None
        return self._program(tuple(self.tracer.instructions[: len(self._loaded)]), self._loaded)[1]

    def _program(
        self, instructions: tuple[Instruction, ...], results: list[Value]
    ) -> tuple[NativeProgram, Callable[[], None]]:
        trace = Trace(
            instructions=instructions,
            num_buffers=self.tracer.num_buffers,
            hidden_states=results[0],
            logits=results[-1],
        )
        batch = self._whole_batch()
        for name, readers in readers_of(trace).items():
            stack = self._stacks[name]
            packed = pack_stacks(
                stack.param(name), stack.tensors, readers, stack.dtype, keep_blocks=stack.keep_blocks
            )
            self._weights |= {form: weight for form, (weight, _) in packed.items()}
            self._rounds_x |= {form for form, (_, layout) in packed.items() if layout.rounds_x}
        try:
            program = NativeProgram(
                trace,
                self._weights,
                self._vectors,
                self._caches,
                self._states,
                max_tokens=max(1, len(batch["input_ids"])),
                max_logits=max(1, self._num_logits),
                max_requests=len(batch["query_start_loc"]) - 1,
                quantize_x=frozenset(self._rounds_x),
                images=self._images,
            )
        except UntraceableOp as error:
            raise Unsupported(str(error)) from error
        return program, partial(
            program.run,
            batch["input_ids"],
            batch["positions"],
            batch["query_start_loc"],
            batch["seq_lens"],
            [batch["block_tables"]],
            [batch["slot_mappings"]],
            batch["logits_indices"],
            self._batch.get("rope_rows"),
            encoder_lens=self._batch.get("seq_lens"),
            ranges=(self._batch["starts"], self._batch["ends"]) if "starts" in self._batch else None,
            windows=[self._batch["windows"]] if "windows" in self._batch else (),
            reach=self._batch.get("reach"),
            image_rows=self._batch.get("image_rows"),
            rope_positions=self._batch.get("rope_positions"),
        )

    def _num_rows_of(self, value: Value) -> int:
        return len(self._whole_batch()["input_ids"]) if value.rows == "tokens" else self._num_logits

    @property
    def _num_logits(self) -> int:
        return len(self._batch.get("starts", self._whole_batch()["logits_indices"]))

    def _load(self, array: Numpy) -> Value:
        """Rows of an array as activations: a weight of the same dtype, looked up row by row."""
        rows = np.ascontiguousarray(array).reshape(len(array), math.prod(array.shape[1:]))
        name = f"array {len(self._loaded)}"
        dtype: Any = "bfloat16" if array.dtype == np.uint16 else str(array.dtype)
        if array.dtype == np.int32:
            rows = rows.view(np.float32)  # moved as it is
        # A weight has at least one row.
        stored: Any = "float32" if dtype == "int32" else dtype
        self._weights[name] = _ops.PackedWeight(stored, max(1, len(rows)), rows.shape[1])
        if len(rows):
            self._weights[name].write_dense(0, rows, any_value=True)  # activations may hold NaN
        self._num_rows = len(rows)
        value = Value(
            buffer=self.tracer.num_buffers,
            rows="tokens",
            cols=rows.shape[1],
            column=0,
            stride=rows.shape[1],
            dtype=dtype,
            head_dim=array.shape[2] if array.ndim == 3 else 0,
        )
        self.tracer.num_buffers += 1
        self.tracer.instructions.append(
            Instruction(
                op="embedding",
                inputs=(InputRef(field="input_ids"), ParamRef(name=name, shape=rows.shape)),
                outputs=(value,),
                attrs={},
            )
        )
        self._loaded.append(value)
        return value

    def _whole_batch(self) -> dict[str, npt.NDArray[np.int32]]:
        """The int32 arrays that the op was given, and one request of as many rows for the rest."""
        given = next((self._batch[name] for name in _BY_TOKEN if name in self._batch), None)
        count = self._num_rows if given is None else len(given)
        assert count is not None, "an op has rows"
        rows = np.arange(count, dtype=np.int32)
        starts = self._batch.get("query_start_loc", np.array([0, count], np.int32))
        return {
            "input_ids": rows if self._loaded else np.zeros(count, np.int32),
            "positions": np.zeros(count, np.int32),
            "query_start_loc": starts,
            "seq_lens": np.diff(starts),
            "block_tables": np.full((len(starts) - 1, 1), -1, np.int32),
            "slot_mappings": np.full(count, -1, np.int32),
            "logits_indices": np.zeros(len(self._batch.get("windows", ())), np.int32),
        } | self._batch
