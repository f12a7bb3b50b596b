"""The ops as a tracer sees them.

Splits and head views cost nothing: they become columns of a buffer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from headrace.core.ops import OpTable, op_names

from .values import (
    SEGMENT,
    CacheRef,
    InputRef,
    Instruction,
    Operand,
    ParamRef,
    Rows,
    RowsRef,
    StateRef,
    UntraceableOp,
    Value,
)

TAKES_GAPS = ("absorb_keys", "concat", "rope", "split", "split_heads")
"""Ops that read heads as they lie; others read a copy of heads that have gaps between them."""
MAX_CONV_WIDTH = 8


class Tracer:
    """The ops as a tracer sees them: each notes an instruction and returns the shape of its result."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.instructions: list[Instruction] = []
        self.num_buffers = 0
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
            return rule(*(arguments if op in TAKES_GAPS else self._close_gaps(arguments)), **options)
        except UntraceableOp as error:
            return self._segment(op, self._close_gaps(arguments), options, error)

    def _segment(self, op: str, arguments: Sequence[Any], options: Mapping[str, Any], reason: UntraceableOp) -> Any:
        """An instruction that calls the definition. Raises UntraceableOp if it has a cache or torch is missing."""
        if find_spec("torch") is None:
            raise UntraceableOp(f"{reason}, and torch, which could run its definition, is not installed") from reason
        from .segments import NUM_LOGITS, NUM_TOKENS, leaves, result_shapes

        operands = [*leaves(arguments), *leaves(tuple(options.values()))]
        if any(isinstance(operand, CacheRef | StateRef | RowsRef) for operand in operands):
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
        if token_ids.field not in ("input_ids", "positions", "token_types"):
            raise UntraceableOp(f"embedding of {token_ids.field} has no native form")
        out = self._new("tokens", weight.shape[1])
        return self._emit("embedding", (token_ids, weight), out)

    def linear(self, x: Value, weight: ParamRef, bias: ParamRef | None = None) -> Value:
        return self._emit("linear", (x, weight, bias), self._new(x.rows, weight.shape[0], x.dtype))

    # ---- stacked weights ----------------------------------------------------------------------------------
    def route_experts(
        self, logits: Value, correction: ParamRef | None = None, *, num_experts_per_token: int, **options: Any
    ) -> tuple[Value, Value]:
        count = num_experts_per_token
        outputs = self._new(logits.rows, count, "float32"), self._new(logits.rows, count, "int32")
        self._record("route_experts", (logits, correction), outputs, **options)
        return outputs

    def part_identities(self, weights: Value, experts: Value, *, num_experts: int) -> tuple[Value, Value, Value]:
        outputs = self._like(weights), self._like(experts), self._new(weights.rows, 1, "float32")
        self._record("part_identities", (weights, experts), outputs, num_experts=num_experts)
        return outputs

    def grouped_experts(
        self,
        x: Value,
        weights: Value,
        experts: Value,
        gate_up: ParamRef,
        down: ParamRef,
        gate_up_bias: ParamRef | None = None,
        down_bias: ParamRef | None = None,
        *,
        activation: str = "silu",
        clamp: float = 0.0,
        alpha: float = 1.702,
        scale_input: bool = False,
        gated: bool = True,
        partial: bool = False,
    ) -> Value:
        inner, out = gate_up.shape[0] // gate_up.num_stacked, down.shape[0] // down.num_stacked
        widths = [inner, down.shape[1], out, *([x.cols] if scale_input else [])]
        buffers = [self._new("chunk", experts.cols * width, x.dtype) for width in widths]
        outputs = (self._new(x.rows, out, x.dtype), *buffers)
        inputs = (x, weights, experts, gate_up, down, gate_up_bias, down_bias)
        options = {"activation": activation, "gated": gated, "clamp": clamp, "alpha": alpha}
        self._record("grouped_experts", inputs, outputs, **options)
        return outputs[0]

    def absorb_keys(self, query: Value, weight: ParamRef) -> Value:
        heads, rank = query.cols // query.head_dim, weight.shape[1]
        out = self._new(query.rows, heads * rank, query.dtype, rank)
        return self._emit("absorb_keys", (query, weight), out, key_dim=query.head_dim)

    def expand_values(self, latents: Value, weight: ParamRef, *, v_head_dim: int) -> Value:
        heads = latents.cols // latents.head_dim
        out = self._new(latents.rows, heads * v_head_dim, latents.dtype, v_head_dim)
        return self._emit("expand_values", (latents, weight), out, v_head_dim=v_head_dim)

    # ---- norms and rope -----------------------------------------------------------------------------------
    def rms_norm(self, x: Value, weight: ParamRef | None, *, eps: float) -> Value:
        return self._emit("rms_norm", (x, weight), self._like(x), eps=eps)

    def add_rms_norm(self, x: Value, residual: Value, weight: ParamRef | None, *, eps: float) -> tuple[Value, Value]:
        outputs = self._like(x), self._like(x)
        self._record("add_rms_norm", (x, residual, weight), outputs, eps=eps)
        return outputs

    def layer_norm(self, x: Value, weight: ParamRef | None, bias: ParamRef | None, *, eps: float) -> Value:
        return self._emit("layer_norm", (x, weight, bias), self._like(x), eps=eps)

    def magnitude(self, x: Value, *, centred: bool = False) -> Value:
        return self._emit("magnitude", (x,), self._new(x.rows, 1, "float32"), centred=centred)

    def rotary_angles(
        self,
        positions: InputRef,
        inv_freq: ParamRef,
        attention_factor: ParamRef,
        rows: InputRef | None = None,
        *,
        axes: Sequence[int] = (),
    ) -> tuple[Value, Value]:
        half = inv_freq.shape[1]
        outputs = self._new("tokens", half, "float32"), self._new("tokens", half, "float32")
        self._record("rotary_angles", (positions, inv_freq, attention_factor, rows), outputs, axes=tuple(axes))
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
        chunk: int = 0,
        softcap: float = 0.0,
        sinks: ParamRef | None = None,
        alibi_slopes: ParamRef | None = None,
        relative_bias: ParamRef | None = None,
        reach: InputRef | None = None,
        causal: bool = True,
        max_query_len: int = 0,
        max_seq_len: int = 0,
    ) -> Value:
        inputs = (query, kv_cache, query_start_loc, seq_lens, block_table, sinks, alibi_slopes, relative_bias)
        sees = "encoder" if not causal else "past" if reach is None else "ahead"
        options = dict(scale=scale, window=window, chunk=chunk, softcap=softcap, sees=sees)
        return self._emit("paged_attention", inputs, self._like(query), **options)

    # ---- whole requests -----------------------------------------------------------------------------------
    def encoder_attention(
        self,
        query: Value,
        key: Value,
        value: Value,
        query_start_loc: InputRef,
        relative_bias: ParamRef | None = None,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        max_query_len: int = 0,
    ) -> Value:
        inputs = (query, key, value, query_start_loc, relative_bias)
        options = dict(scale=scale, window=window, softcap=softcap)
        return self._emit("encoder_attention", inputs, self._like(query), **options)

    def features(self, cols: int) -> Value:
        """The frames that an encoder reads; no op, but what stands for the batch's array."""
        return self._emit("features", (), self._new("logits", cols, "float32"))

    def stack_rows(self, x: Value, indices: InputRef) -> Value:
        return self._emit("stack_rows", (x, indices), self._new(indices.rows, x.cols * indices.cols, x.dtype))

    def mean_rows(self, x: Value, starts: InputRef, ends: InputRef) -> Value:
        return self._emit("mean_rows", (x, starts, ends), self._new("logits", x.cols, x.dtype))

    # ---- states -------------------------------------------------------------------------------------------
    def causal_conv(
        self,
        x: Value,
        weight: ParamRef,
        bias: ParamRef | None,
        state: StateRef,
        query_start_loc: InputRef,
        from_slots: InputRef,
        to_slots: InputRef,
        *,
        activation: str | None = None,
    ) -> tuple[Value, StateRef]:
        width = weight.shape[-1]
        if not 1 <= width <= MAX_CONV_WIDTH or activation not in (None, "silu"):
            raise UntraceableOp(f"a convolution of {width} positions, then {activation}, has no native form")
        inputs = (x, weight, bias, state, query_start_loc, from_slots, to_slots)
        return self._emit("causal_conv", inputs, self._like(x), width=width, is_silu=activation == "silu"), state

    def selective_scan(
        self,
        x: Value,
        dt: Value,
        b: Value,
        c: Value,
        a_log: ParamRef,
        d: ParamRef,
        dt_bias: ParamRef,
        state: StateRef,
        query_start_loc: InputRef,
        from_slots: InputRef,
        to_slots: InputRef,
        *,
        dt_min: float = 0.0,
        dt_max: float = math.inf,
        max_query_len: int = 0,
    ) -> tuple[Value, StateRef]:
        inputs = (x, dt, b, c, a_log, d, dt_bias, state, query_start_loc, from_slots, to_slots)
        return self._emit("selective_scan", inputs, self._like(x), dt_min=dt_min, dt_max=dt_max), state

    def lru_inputs(
        self,
        x: Value,
        input_gates: Value,
        decay_gates: Value,
        input_bias: ParamRef,
        decay_bias: ParamRef,
        log_rate: ParamRef,
        positions: InputRef,
    ) -> tuple[Value, Value, Value]:
        outputs = self._like(x), self._like(x), self._new(x.rows, 1, x.dtype)
        inputs = (x, input_gates, decay_gates, input_bias, decay_bias, log_rate, positions)
        self._record("lru_inputs", inputs, outputs)
        return outputs

    def gated_delta(
        self,
        query: Value,
        key: Value,
        value: Value,
        dt: Value,
        beta: Value,
        a_log: ParamRef,
        dt_bias: ParamRef,
        state: StateRef,
        query_start_loc: InputRef,
        from_slots: InputRef,
        to_slots: InputRef,
        *,
        beta_scale: float = 1.0,
        max_query_len: int = 0,
    ) -> tuple[Value, StateRef]:
        inputs = (query, key, value, dt, beta, a_log, dt_bias, state, query_start_loc, from_slots, to_slots)
        return self._emit("gated_delta", inputs, self._like(value), beta_scale=beta_scale), state

    def wkv(
        self,
        key: Value,
        value: Value,
        a_log: ParamRef,
        bonus: ParamRef,
        state: StateRef,
        query_start_loc: InputRef,
        from_slots: InputRef,
        to_slots: InputRef,
        *,
        max_query_len: int = 0,
    ) -> tuple[Value, StateRef]:
        inputs = (key, value, a_log, bonus, state, query_start_loc, from_slots, to_slots)
        return self._emit("wkv", inputs, self._like(value)), state

    # ---- elementwise and shapes ---------------------------------------------------------------------------
    def add(self, x: Value, y: Value) -> Value:
        return self._emit("add", (x, y), self._like(x))

    def scale(self, x: Value, factor: float) -> Value:
        return self._emit("scale", (x,), self._like(x), factor=factor)

    def softcap(self, x: Value, cap: float) -> Value:
        return self._emit("softcap", (x,), self._like(x), cap=cap)

    def gate(self, x: Value, gates: Value) -> Value:
        return self._emit("modulate", (x, gates), self._like(x), is_gate=True)

    def mul(self, x: Value, y: Value | ParamRef) -> Value:
        return self._emit("modulate", (x, y), self._like(x), is_gate=False)

    def xielu(self, x: Value, alpha_p: ParamRef, alpha_n: ParamRef) -> Value:
        return self._emit("xielu", (x, alpha_p, alpha_n), self._like(x))

    def clamp(self, x: Value, *, limit: float) -> Value:
        return self._emit("clamp", (x,), self._like(x), limit=limit)

    def log_growth(self, positions: InputRef, *, factor: float, length: int, shift: int = 0) -> Value:
        out = self._new("tokens", 1, "float32")
        return self._emit("log_growth", (positions,), out, factor=factor, length=length, shift=shift)

    def act(self, x: Value, *, activation: str) -> Value:
        return self._emit("act", (x,), self._like(x), activation=activation)

    def act_mul(self, x: Value, *, activation: str) -> Value:
        return self._emit("act_mul", (x,), self._new(x.rows, x.cols // 2, x.dtype), activation=activation)

    def cast(self, x: Value, *, dtype: str) -> Value:
        if dtype == x.dtype:
            return x
        return self._emit("cast", (x,), self._new(x.rows, x.cols, dtype, x.head_dim))

    def gather(self, x: Value, indices: InputRef) -> Value:
        if indices.field != "logits_indices" or x.rows != "tokens":
            raise UntraceableOp(f"gather by {indices.field} has no native form")
        return self._emit("gather", (x, indices), self._new("logits", x.cols, x.dtype))

    def place_rows(self, x: Value, rows: RowsRef, indices: InputRef, *, add: bool = False) -> Value:
        return self._emit("place_rows", (x, rows, indices), self._like(x), add=add)

    def split(self, x: Value | RowsRef, sizes: Sequence[int]) -> tuple[Value | RowsRef, ...]:
        if isinstance(x, RowsRef):
            return tuple(RowsRef(column=x.column + sum(sizes[:n]), cols=size) for n, size in enumerate(sizes))
        assert sum(sizes) == x.width, (sizes, x)
        starts = [x.column + sum(sizes[:n]) for n in range(len(sizes))]
        if not x.head_dim:
            return tuple(self._view(x, at, size) for at, size in zip(starts, sizes, strict=True))
        return tuple(
            replace(x, column=at, cols=x.num_heads * size, head_dim=size, head_stride=x.head_step)
            for at, size in zip(starts, sizes, strict=True)
        )

    def concat(self, arrays: Sequence[Value]) -> Value:
        first, width = arrays[0], sum(array.width for array in arrays)
        out = self._new(first.rows, first.num_heads * width, first.dtype, width if first.head_dim else 0)
        return self._emit("concat", tuple(arrays), out)

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

    def _close_gaps(self, operand: Any) -> Any:
        """Copies of heads that have gaps between them, in sequences too; anything else as it is."""
        if isinstance(operand, list | tuple):
            return tuple(self._close_gaps(part) for part in operand)
        if not isinstance(operand, Value) or not operand.head_stride:
            return operand
        return self._emit("copy_heads", (operand,), self._like(operand))

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
