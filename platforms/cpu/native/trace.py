"""Records a forward function once, with symbolic sizes, as a list of instructions.

The forward functions treat arrays as opaque, so tracing needs no trick: a table of ops that note what they were
asked and return what the result will look like. Splits and head views cost nothing: they become columns of a buffer.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

from headrace.core.models.declare import declare_params
from headrace.core.models.decoder import compute_logits, decoder
from headrace.core.models.params import Param
from headrace.core.models.spec import ModelSpec
from headrace.core.ops import OpTable, op_names
from headrace.core.stages import ForwardBatch, KVCaches

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "quick_gelu")
MAX_QUERY_HEADS = 32
"""Query heads that may share a KV head."""
SEGMENT = "segment"
"""An instruction that calls the definition of the op in its attributes."""
Rows = Literal["tokens", "logits"]
"""Which symbolic size counts a value's rows: num_tokens, or the rows whose logits are needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """[rows, cols] numbers: columns column : column + cols of a buffer whose rows are `stride` columns long.

    head_dim: the columns are heads of this size; 0: they are not.
    """

    buffer: int
    rows: Rows
    cols: int
    column: int
    stride: int
    dtype: str
    head_dim: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamRef:
    """A declared parameter."""

    name: str
    shape: tuple[int, ...]
    num_stacked: int = 0
    """matrices of a stacked parameter; 0: it is none"""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRef:
    """An array of the ForwardBatch, by field name; `group` for the ones there is one of per KV group."""

    field: str
    group: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRef:
    """The KV cache of a layer."""

    layer: int


Operand = Value | ParamRef | InputRef | CacheRef | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One op: what it reads, what it writes, and its static arguments."""

    op: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Value, ...]
    attrs: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A forward pass: instructions in order, and the values that a step reads from it."""

    instructions: tuple[Instruction, ...]
    num_buffers: int
    hidden_states: Value
    logits: Value

    @property
    def segments(self) -> tuple[Instruction, ...]:
        """Instructions that run in torch."""
        return tuple(instruction for instruction in self.instructions if instruction.op == SEGMENT)


class UntraceableOp(Exception):
    """The forward function used an op that this tracer has no rule for."""


def trace_decoder(spec: ModelSpec, dtype: str, group_of_layer: Sequence[int]) -> Trace:
    """Trace decoder and logits of a spec whose activations have `dtype`. Raises UntraceableOp."""
    if spec.foreign is not None:
        raise UntraceableOp("transformers' own code computes it")
    if spec.kind == "encoder_decoder":
        raise UntraceableOp("native programs have no encoder beside the decoder")
    if spec.kind != "decoder" or spec.pooler is not None:
        raise UntraceableOp("native programs give logits of tokens, and this model makes vectors")
    if spec.vision is not None:
        raise UntraceableOp("native programs have no encoder of images; HEADRACE_IMAGES=0 leaves it out")
    if any(layer.mixer is not None for layer in spec.layers):
        raise UntraceableOp("native programs have no kernels for recurrences over positions")
    tracer = Tracer(dtype)
    params = _Params({param.name: param for param in declare_params(spec)})
    num_groups = max(group_of_layer) + 1
    batch = ForwardBatch(
        input_ids=InputRef(field="input_ids"),
        positions=InputRef(field="positions"),
        query_start_loc=InputRef(field="query_start_loc"),
        seq_lens=InputRef(field="seq_lens"),
        block_tables=[InputRef(field="block_tables", group=group) for group in range(num_groups)],
        slot_mappings=[InputRef(field="slot_mappings", group=group) for group in range(num_groups)],
        logits_indices=InputRef(field="logits_indices"),
        rope_rows=InputRef(field="rope_rows"),
    )
    kv = KVCaches(
        layers=[CacheRef(layer=layer) for layer in range(spec.num_layers)],
        group_of_layer=tuple(group_of_layer),
        states=[()] * spec.num_layers,
    )
    ops = tracer.table()
    hidden_states, _ = decoder(ops, spec, params, kv, batch)
    logits = compute_logits(ops, spec, params, ops.gather(hidden_states, batch.logits_indices))
    return Trace(
        instructions=tuple(tracer.instructions),
        num_buffers=tracer.num_buffers,
        hidden_states=hidden_states,
        logits=logits,
    )


class _Params(Mapping[str, ParamRef]):
    """Declared parameters as references."""

    def __init__(self, declared: Mapping[str, Param]) -> None:
        self._declared = declared

    def __getitem__(self, name: str) -> ParamRef:
        param = self._declared[name]
        return ParamRef(name=name, shape=param.shape, num_stacked=param.num_stacked if param.kind == "stacked" else 0)

    def __iter__(self) -> Iterator[str]:
        return iter(self._declared)

    def __len__(self) -> int:
        return len(self._declared)


class Tracer:
    """The ops as a tracer sees them: each notes an instruction and returns the shape of its result."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.instructions: list[Instruction] = []
        self.num_buffers = 0
        self._num_kv_heads: dict[int, int] = {}
        self._shapes: dict[str, list[tuple[tuple[int, ...], str]] | None] = {}

    def table(self) -> OpTable:
        """An op table that traces; an op without a rule here raises UntraceableOp when it is called."""
        return OpTable({name: partial(self._trace, name) for name in op_names()})

    def _trace(self, op: str, /, *arguments: Any, **options: Any) -> Any:
        """By the rule for this op, or as a segment if there is none or it does not go that far."""
        rule = getattr(self, op, None)
        try:
            if rule is None:
                raise UntraceableOp(f"op {op} has no native form")
            return rule(*arguments, **options)
        except UntraceableOp as error:
            return self._segment(op, arguments, options, error)

    def _segment(self, op: str, arguments: Sequence[Any], options: Mapping[str, Any], reason: UntraceableOp) -> Any:
        """An instruction that calls the definition. Raises UntraceableOp if it has a cache or torch is missing."""
        if find_spec("torch") is None:
            raise UntraceableOp(f"{reason}, and torch, which could run its definition, is not installed") from reason
        from .segments import NUM_LOGITS, NUM_TOKENS, leaves, result_shapes

        operands = [*leaves(arguments), *leaves(tuple(options.values()))]
        if any(isinstance(operand, CacheRef) for operand in operands):
            raise reason
        num_rows: dict[Rows, int] = {"tokens": NUM_TOKENS, "logits": NUM_LOGITS}

        def stand_in(operand: Any) -> tuple[tuple[int, ...], str] | None:
            if isinstance(operand, Value):
                heads = (operand.cols // operand.head_dim, operand.head_dim) if operand.head_dim else (operand.cols,)
                return (num_rows[operand.rows], *heads), operand.dtype
            if isinstance(operand, ParamRef):
                if not operand.num_stacked:
                    return operand.shape, "float32" if len(operand.shape) == 1 else self.dtype
                rows, cols = operand.shape
                return (operand.num_stacked, rows // operand.num_stacked, cols), self.dtype
            if isinstance(operand, InputRef):
                return (2,) if operand.field == "query_start_loc" else (NUM_TOKENS,), "int32"
            return None

        key = repr((op, [stand_in(operand) or operand for operand in operands]))
        if key not in self._shapes:
            self._shapes[key] = result_shapes(op, arguments, options, stand_in)
        shapes = self._shapes[key]
        if shapes is None:
            raise reason
        outputs = []
        for shape, dtype in shapes:
            rows = next((name for name, count in num_rows.items() if shape[:1] == (count,)), None)
            if rows is None or len(shape) not in (2, 3):
                raise reason
            head_dim = shape[2] if len(shape) == 3 else 0
            outputs.append(self._new(rows, math.prod(shape[1:]), dtype, head_dim))
        inputs = tuple(operand for operand in operands if isinstance(operand, Value | ParamRef | InputRef))
        self._record(
            SEGMENT, inputs, tuple(outputs), definition=op, arguments=tuple(arguments), options=dict(options)
        )
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    # ---- packed weights -----------------------------------------------------------------------------------
    def embedding(self, token_ids: InputRef, weight: ParamRef) -> Value:
        if token_ids.field not in ("input_ids", "positions"):
            raise UntraceableOp(f"embedding of {token_ids.field} has no native form")
        out = self._new("tokens", weight.shape[1])
        return self._emit("embedding", (token_ids, weight), out)

    def linear(self, x: Value, weight: ParamRef, bias: ParamRef | None = None) -> Value:
        return self._emit("linear", (x, weight, bias), self._new(x.rows, weight.shape[0], x.dtype))

    # ---- norms and rope -----------------------------------------------------------------------------------
    def rms_norm(self, x: Value, weight: ParamRef | None, *, eps: float) -> Value:
        return self._emit("rms_norm", (x, weight), self._like(x), eps=eps)

    def add_rms_norm(self, x: Value, residual: Value, weight: ParamRef | None, *, eps: float) -> tuple[Value, Value]:
        outputs = self._like(x), self._like(x)
        self._record("add_rms_norm", (x, residual, weight), outputs, eps=eps)
        return outputs

    def layer_norm(self, x: Value, weight: ParamRef | None, bias: ParamRef | None, *, eps: float) -> Value:
        if x.head_dim:
            raise UntraceableOp("layer_norm of heads has no native form")
        return self._emit("layer_norm", (x, weight, bias), self._like(x), eps=eps)

    def rotary_angles(
        self,
        positions: InputRef,
        inv_freq: ParamRef,
        attention_factor: ParamRef,
        rows: InputRef | None = None,
        *,
        axes: Sequence[int] = (),
    ) -> tuple[Value, Value]:
        if axes:
            raise UntraceableOp("rotary_angles has no native form for several positions a token")
        half = inv_freq.shape[1]
        outputs = self._new("tokens", half, "float32"), self._new("tokens", half, "float32")
        self._record("rotary_angles", (positions, inv_freq, attention_factor, rows), outputs)
        return outputs

    def rope(self, x: Value, cos: Value, sin: Value, *, interleaved: bool = False) -> Value:
        return self._emit("rope", (x, cos, sin), self._like(x), interleaved=interleaved)

    # ---- kv cache -----------------------------------------------------------------------------------------
    def write_kv(self, kv_cache: CacheRef, key: Value, value: Value, slot_mapping: InputRef) -> CacheRef:
        self._num_kv_heads[kv_cache.layer] = key.cols // key.head_dim
        self._record("write_kv", (kv_cache, key, value, slot_mapping), ())
        return kv_cache

    def paged_attention(
        self,
        query: Value,
        kv_cache: CacheRef,
        query_start_loc: InputRef,
        seq_lens: InputRef,
        block_table: InputRef,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: ParamRef | None = None,
        alibi_slopes: ParamRef | None = None,
        relative_bias: ParamRef | None = None,
        reach: InputRef | None = None,
        causal: bool = True,
        max_query_len: int = 0,
        max_seq_len: int = 0,
    ) -> Value:
        if relative_bias is not None or reach is not None or not causal:
            raise UntraceableOp("paged_attention has no native form with a bias by distance or sight ahead")
        num_heads = query.cols // query.head_dim
        if num_heads > MAX_QUERY_HEADS * self._num_kv_heads.get(kv_cache.layer, num_heads):
            raise UntraceableOp(f"paged_attention has no native form for {num_heads} query heads to one KV head")
        inputs = (query, kv_cache, query_start_loc, seq_lens, block_table, sinks, alibi_slopes)
        return self._emit("paged_attention", inputs, self._like(query), scale=scale, window=window, softcap=softcap)

    # ---- elementwise and shapes ---------------------------------------------------------------------------
    def add(self, x: Value, y: Value) -> Value:
        return self._emit("add", (x, y), self._like(x))

    def scale(self, x: Value, factor: float) -> Value:
        return self._emit("scale", (x,), self._like(x), factor=factor)

    def softcap(self, x: Value, cap: float) -> Value:
        return self._emit("softcap", (x,), self._like(x), cap=cap)

    def act(self, x: Value, *, activation: str) -> Value:
        _check_activation(activation)
        return self._emit("act", (x,), self._like(x), activation=activation)

    def act_mul(self, x: Value, *, activation: str) -> Value:
        _check_activation(activation)
        return self._emit("act_mul", (x,), self._new(x.rows, x.cols // 2, x.dtype), activation=activation)

    def cast(self, x: Value, *, dtype: str) -> Value:
        if dtype == x.dtype:
            return x
        return self._emit("cast", (x,), self._new(x.rows, x.cols, dtype, x.head_dim))

    def gather(self, x: Value, indices: InputRef) -> Value:
        if indices.field != "logits_indices" or x.rows != "tokens":
            raise UntraceableOp(f"gather by {indices.field} has no native form")
        return self._emit("gather", (x, indices), self._new("logits", x.cols, x.dtype))

    def split(self, x: Value, sizes: Sequence[int]) -> tuple[Value, ...]:
        if x.head_dim:
            raise UntraceableOp("split within heads has no native form")
        assert sum(sizes) == x.cols, (sizes, x)
        starts = [sum(sizes[:n]) for n in range(len(sizes))]
        return tuple(self._view(x, x.column + at, size) for at, size in zip(starts, sizes, strict=True))

    def split_heads(self, x: Value, *, head_dim: int) -> Value:
        assert x.cols % head_dim == 0, (x, head_dim)
        return self._view(x, x.column, x.cols, head_dim)

    def merge_heads(self, x: Value) -> Value:
        return self._view(x, x.column, x.cols)

    # ---- bookkeeping --------------------------------------------------------------------------------------
    def _new(self, rows: Rows, cols: int, dtype: str = "", head_dim: int = 0) -> Value:
        self.num_buffers += 1
        return Value(
            buffer=self.num_buffers - 1,
            rows=rows,
            cols=cols,
            column=0,
            stride=cols,
            dtype=dtype or self.dtype,
            head_dim=head_dim,
        )

    def _like(self, x: Value) -> Value:
        return self._new(x.rows, x.cols, x.dtype, x.head_dim)

    def _view(self, x: Value, column: int, cols: int, head_dim: int = 0) -> Value:
        return Value(
            buffer=x.buffer, rows=x.rows, cols=cols, column=column, stride=x.stride, dtype=x.dtype, head_dim=head_dim
        )

    def _record(self, op: str, inputs: tuple[Operand, ...], outputs: tuple[Value, ...], **attrs: Any) -> None:
        self.instructions.append(Instruction(op=op, inputs=inputs, outputs=outputs, attrs=attrs))

    def _emit(self, op: str, inputs: tuple[Operand, ...], out: Value, **attrs: Any) -> Value:
        self._record(op, inputs, (out,), **attrs)
        return out


def _check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise UntraceableOp(f"activation {activation} has no native form")
