"""Records a forward function once, with symbolic sizes, as a list of instructions.

The forward functions treat arrays as opaque, so tracing needs no trick: a table of ops that note what they were
asked and return what the result will look like. Splits and head views cost nothing: they become columns of a buffer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.core.models.declare import declare_params
from headrace.core.models.decoder import compute_logits, decoder
from headrace.core.models.params import Param
from headrace.core.models.spec import ModelSpec
from headrace.core.ops import OpTable, op_names
from headrace.core.stages import ForwardBatch, KVCaches

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


class UntraceableOp(Exception):
    """The forward function used an op that this tracer has no rule for."""


def trace_decoder(spec: ModelSpec, dtype: str, group_of_layer: Sequence[int]) -> Trace:
    """Trace decoder and logits of a spec whose activations have `dtype`. Raises UntraceableOp."""
    if spec.kind != "decoder" or spec.pooler is not None:
        raise UntraceableOp("native programs give logits of tokens, and this model makes vectors")
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
        return ParamRef(name=name, shape=self._declared[name].shape)

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

    def table(self) -> OpTable:
        """An op table that traces; an op without a rule here raises UntraceableOp when it is called."""
        return OpTable({name: getattr(self, name, _untraceable(name)) for name in op_names()})

    # ---- packed weights -----------------------------------------------------------------------------------
    def embedding(self, token_ids: InputRef, weight: ParamRef) -> Value:
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
        return self._emit("layer_norm", (x, weight, bias), self._like(x), eps=eps)

    def rotary_angles(
        self, positions: InputRef, inv_freq: ParamRef, attention_factor: ParamRef, rows: InputRef | None = None
    ) -> tuple[Value, Value]:
        half = inv_freq.shape[1]
        outputs = self._new("tokens", half, "float32"), self._new("tokens", half, "float32")
        self._record("rotary_angles", (positions, inv_freq, attention_factor, rows), outputs)
        return outputs

    def rope(self, x: Value, cos: Value, sin: Value, *, interleaved: bool = False) -> Value:
        return self._emit("rope", (x, cos, sin), self._like(x), interleaved=interleaved)

    # ---- kv cache -----------------------------------------------------------------------------------------
    def write_kv(self, kv_cache: CacheRef, key: Value, value: Value, slot_mapping: InputRef) -> CacheRef:
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
        causal: bool = True,
        max_query_len: int = 0,
        max_seq_len: int = 0,
    ) -> Value:
        if relative_bias is not None or not causal:
            raise UntraceableOp("paged_attention has no native form with a bias by distance or without a causal mask")
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
        return self._emit("act", (x,), self._like(x), activation=activation)

    def act_mul(self, x: Value, *, activation: str) -> Value:
        return self._emit("act_mul", (x,), self._new(x.rows, x.cols // 2, x.dtype), activation=activation)

    def cast(self, x: Value, *, dtype: str) -> Value:
        if dtype == x.dtype:
            return x
        return self._emit("cast", (x,), self._new(x.rows, x.cols, dtype, x.head_dim))

    def gather(self, x: Value, indices: InputRef) -> Value:
        if indices.field != "logits_indices":
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


def _untraceable(name: str) -> Any:
    def refuse(*args: object, **kwargs: object) -> None:
        raise UntraceableOp(f"op {name} has no native form")

    return refuse
