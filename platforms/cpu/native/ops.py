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
from .trace import CacheRef, InputRef, Instruction, ParamRef, Trace, Tracer, UntraceableOp, Value
from .weights import pack

Numpy = npt.NDArray[Any]

_NUM_VALUES = {
    "embedding": 0,
    "linear": 1,
    "rms_norm": 1,
    "add_rms_norm": 2,
    "layer_norm": 1,
    "rotary_angles": 0,
    "rope": 3,
    "write_kv": 2,
    "paged_attention": 1,
    "add": 2,
    "scale": 1,
    "softcap": 1,
    "act": 1,
    "act_mul": 1,
    "cast": 1,
    "gather": 1,
}
"""Ops that are records, and how many of their first arrays are activations; arrays behind those are parameters."""
_INPUTS = {
    "embedding": ("input_ids",),
    "rotary_angles": ("positions", "rope_rows"),
    "gather": ("logits_indices",),
    "write_kv": ("slot_mappings",),
    "paged_attention": ("query_start_loc", "seq_lens", "block_tables"),
}
"""What the int32 arrays of an op are in a batch, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeWeight:
    """A packed weight, and the dtype in which `embedding` gives its rows."""

    packed: _ops.PackedWeight
    dtype: str
    rounds_x: bool


def native_ops(dtype: str, *, keep_blocks: bool) -> OpTable:
    """The ops that have a native form, for activations in `dtype`; the others raise Unsupported when called.

    keep_blocks: as for `weights.pack`.
    """
    table: dict[str, Callable[..., Any]] = {name: partial(_refuse, name) for name in op_names()}
    table |= {name: getattr(sampling_ops(), name) for name in _SAMPLING}
    table |= {name: partial(_run_op, name, dtype) for name in _NUM_VALUES}
    table |= {
        "pack_linear": partial(_pack_linear, keep_blocks=keep_blocks),
        "new_kv_cache": _new_kv_cache,
        "gather": partial(_gather, dtype),
        "split": lambda x, sizes: tuple(np.split(x, np.cumsum(sizes)[:-1], axis=-1)),
        "split_heads": lambda x, *, head_dim: x.reshape(len(x), x.shape[1] // head_dim, head_dim),
        "merge_heads": lambda x: x.reshape(len(x), x.shape[1] * x.shape[2]),
        "to_device": lambda array, *, device="cpu": array.copy(),
        "to_host": lambda array: array,
        "upload": _upload,
    }
    assert {name for name, function in table.items() if not _is_refusal(function)} == NATIVE_OPS
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
NATIVE_OPS = frozenset(
    {
        *_NUM_VALUES,
        *_SAMPLING,
        "pack_linear",
        "new_kv_cache",
        "split",
        "split_heads",
        "merge_heads",
        "to_device",
        "to_host",
        "upload",
    }
)
"""Every op that a native program can be made of."""


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
    values = [] if isinstance(results, CacheRef) else [results] if isinstance(results, Value) else list(results)
    return PreparedOp(run=call.prepare(values)[1], idle=call.prepare_loads())


def native_selections() -> tuple[Selection, ...]:
    """Who serves each op on this platform."""
    reason = "no native form; a model that needs this op runs in torch"
    return tuple(
        Selection(op=op, provider="native")
        if op in NATIVE_OPS
        else Selection(op=op, provider=DEFINITION, declined=(("native", reason),))
        for op in op_names()
    )


def _refuse(op: str, /, *arguments: object, **options: object) -> None:
    raise Unsupported(f"op {op} has no native form; a model that needs it runs in torch")


def _is_refusal(function: Callable[..., Any]) -> bool:
    return isinstance(function, partial) and function.func is _refuse


def _pack_linear(tensors: Sequence[HostTensor], *, dtype: str, device: str, keep_blocks: bool) -> NativeWeight:
    packed, layout = pack(tensors, dtype, keep_blocks=keep_blocks)
    return NativeWeight(packed=packed, dtype=dtype, rounds_x=layout.rounds_x)


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
    arrays = call.run([results] if isinstance(results, Value) else list(results))
    return arrays[0] if isinstance(results, Value) else tuple(arrays)


def _trace_op(op: str, dtype: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> "tuple[_Call, Any]":
    """A call that has been traced, and what the tracer returned. Raises Unsupported."""
    call = _Call(op, dtype)
    operands = [call.operand(argument) for argument in arguments]
    named = {name: call.operand(value) for name, value in options.items()}
    try:
        return call, getattr(call.tracer, op)(*operands, **named)
    except UntraceableOp as error:
        raise Unsupported(str(error)) from error


class _Call:
    """The operands of one op as a tracer takes them, and the program that comes of it."""

    def __init__(self, op: str, dtype: str) -> None:
        self.tracer = Tracer(dtype)
        self._num_values = _NUM_VALUES[op]
        self._fields = iter(_INPUTS.get(op, ()))
        self._weights: dict[str, _ops.PackedWeight] = {}
        self._vectors: dict[str, npt.NDArray[np.float32]] = {}
        self._rounds_x: set[str] = set()
        self._caches: list[_ops.KVCache] = []
        self._batch: dict[str, npt.NDArray[np.int32]] = {}
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
            self._caches.append(argument)
            return CacheRef(layer=0)
        if not isinstance(argument, np.ndarray):
            return argument
        if argument.dtype == np.int32:
            field = next(self._fields)
            self._batch[field] = argument
            return InputRef(field=field)
        if len(self._loaded) < self._num_values:
            return self._load(argument)
        name = f"vector {len(self._vectors)}"
        self._vectors[name] = argument
        return ParamRef(name=name, shape=argument.shape)

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
        try:
            program = NativeProgram(
                trace,
                self._weights,
                self._vectors,
                self._caches,
                max_tokens=max(1, len(batch["input_ids"])),
                max_logits=max(1, len(batch["logits_indices"])),
                quantize_x=frozenset(self._rounds_x),
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
        )

    def _num_rows_of(self, value: Value) -> int:
        batch = self._whole_batch()
        return len(batch["input_ids"] if value.rows == "tokens" else batch["logits_indices"])

    def _load(self, array: Numpy) -> Value:
        """Rows of an array as activations: a weight of the same dtype, looked up row by row."""
        rows = np.ascontiguousarray(array).reshape(len(array), math.prod(array.shape[1:]))
        name = f"array {len(self._loaded)}"
        dtype: Any = "bfloat16" if array.dtype == np.uint16 else str(array.dtype)
        # A weight has at least one row.
        self._weights[name] = _ops.PackedWeight(dtype, max(1, len(rows)), rows.shape[1])
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
        given = self._batch.get("input_ids", self._batch.get("positions"))
        count = self._num_rows if given is None else len(given)
        assert count is not None, "an op has rows"
        rows = np.arange(count, dtype=np.int32)
        return {
            "input_ids": rows if self._loaded else np.zeros(count, np.int32),
            "positions": np.zeros(count, np.int32),
            "query_start_loc": np.array([0, count], np.int32),
            "seq_lens": np.array([count], np.int32),
            "block_tables": np.full((1, 1), -1, np.int32),
            "slot_mappings": np.full(count, -1, np.int32),
            "logits_indices": np.empty(0, np.int32),
        } | self._batch
