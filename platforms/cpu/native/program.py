"""Lowers a trace to a native program: every value gets a place in the arena, every instruction a record."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.kernels.cpu import _ops

from .arena import max_rows_of, plan_arena
from .own_rows import OWN_BLOCK_SIZE, biases_by_distance, own_blocks, own_heads
from .stacks import stack_name
from .values import CacheRef, InputRef, Instruction, ParamRef, RowsRef, StateRef, Trace, UntraceableOp, Value

Vectors = Mapping[str, npt.NDArray[np.float32]]
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4}


class NativeProgram:
    """A forward pass over fixed weights and caches. `run` computes hidden states and logits of one step.

    quantize_x: products with blocks round each 32 activations to 8 bits, which lets integers do the work. tensors:
    parameters of segments, as torch's. images: the rows that are kept of images.
    """

    def __init__(
        self,
        trace: Trace,
        weights: Mapping[str, _ops.PackedWeight],
        vectors: Vectors,
        caches: Mapping[CacheRef, _ops.KVCache],
        states: Mapping[StateRef, npt.NDArray[Any]] | None = None,
        *,
        max_tokens: int,
        max_logits: int,
        max_requests: int = 0,
        quantize_x: frozenset[str],
        tensors: Mapping[str, Any] | None = None,
        images: npt.NDArray[Any] | None = None,
    ) -> None:
        max_rows = max_rows_of(max_tokens, max_logits)
        arena = plan_arena(trace, max_rows)
        self.arena_bytes = arena.num_bytes
        self._offsets = arena.offsets
        self._weights = weights
        self._vectors = vectors
        self._caches = caches
        self._states = states or {}
        self._quantize_x = quantize_x
        self._tensors = tensors or {}
        self._images = images
        self._batch: Mapping[str, Any] = {}
        self._own_caches: dict[tuple[int, int], _ops.KVCache] = {}
        self._num_own_blocks = own_blocks(max_tokens, max_requests or max_logits)
        self._program = _ops.Program(arena.num_bytes, max_tokens, max_logits)
        self._logits = self._rows(trace.logits, max_logits)
        self._hidden = trace.hidden_states
        for instruction in trace.instructions:
            emit = getattr(self, f"_{instruction.op}", None)
            if emit is None:
                raise UntraceableOp(f"op {instruction.op} has no native record")
            emit(instruction)

    def run(
        self,
        input_ids: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        query_start_loc: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        block_tables: Sequence[npt.NDArray[np.int32]],
        slot_mappings: Sequence[npt.NDArray[np.int32]],
        logits_indices: npt.NDArray[np.int32],
        rope_rows: npt.NDArray[np.int32] | None = None,
        token_types: npt.NDArray[np.int32] | None = None,
        encoder_lens: npt.NDArray[np.int32] | None = None,
        ranges: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]] | None = None,
        features: npt.NDArray[np.float32] | None = None,
        windows: Sequence[npt.NDArray[np.int32]] = (),
        reach: npt.NDArray[np.int32] | None = None,
        image_rows: npt.NDArray[np.int32] | None = None,
        rope_positions: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """One step; the arrays are as in ForwardBatch, `ranges` starts and ends as in PoolingBatch, features and
        windows as in EncoderBatch.

        Results stay in the arena until the next one.
        """
        self._batch = {
            "input_ids": input_ids,
            "positions": positions,
            "query_start_loc": query_start_loc,
            "seq_lens": seq_lens,
            "logits_indices": logits_indices,
            "rope_rows": rope_rows,
        }
        self._program.run(
            input_ids,
            positions,
            query_start_loc,
            seq_lens,
            list(block_tables),
            list(slot_mappings),
            logits_indices,
            rope_rows,
            token_types,
            encoder_lens,
            ranges,
            features,
            list(windows),
            reach,
            image_rows,
            rope_positions,
        )

    def logits(self, num_rows: int) -> npt.NDArray[np.float32]:
        """The logits or vectors of the last step, float32 [num_rows, n]. The next step overwrites them."""
        return self._logits[:num_rows]

    def hidden_states(self, num_rows: int) -> npt.NDArray[Any]:
        """The hidden states of the last step's first tokens, [num_rows, hidden_size]; bfloat16 as uint16."""
        return self.read(self._hidden, num_rows)

    def read(self, value: Value, num_rows: int) -> npt.NDArray[Any]:
        """A copy of a value's first rows, [num_rows, cols]; bfloat16 as uint16. It must be alive at the end."""
        return self._rows(value, num_rows).copy()

    def _rows(self, value: Value, num_rows: int) -> npt.NDArray[Any]:
        dtype = np.dtype("uint16" if value.dtype == "bfloat16" else value.dtype)
        start = self._offsets[value.buffer] + value.column * dtype.itemsize
        strides = (value.stride * dtype.itemsize, dtype.itemsize)
        return np.ndarray((num_rows, value.cols), dtype, self._program.arena, start, strides)

    # ---- one method an op ---------------------------------------------------------------------------------
    def _embedding(self, i: Instruction) -> None:
        ids, weight = i.inputs
        assert isinstance(ids, InputRef) and isinstance(weight, ParamRef)
        self._program.embedding(self._view(i.outputs[0]), self._weights[weight.name], ids.field)

    def _linear(self, i: Instruction) -> None:
        x, weight, bias = i.inputs
        assert isinstance(weight, ParamRef)
        self._program.linear(
            self._view(i.outputs[0]),
            self._view(x),
            self._weights[weight.name],
            self._floats(bias),
            quantize_x=weight.name in self._quantize_x,
        )

    def _part_identities(self, i: Instruction) -> None:
        weights, experts, share = (self._view(value) for value in i.outputs)
        from_weights, from_experts = (self._view(value) for value in i.inputs)
        num_experts = i.attrs["num_experts"]
        self._program.part_identities(weights, experts, share, from_weights, from_experts, num_experts)

    def _route_experts(self, i: Instruction) -> None:
        logits, correction = i.inputs
        weights, experts = i.outputs
        options = i.attrs
        self._program.route_experts(
            self._view(weights),
            self._view(experts),
            self._view(logits),
            self._floats(correction),
            options.get("score", "softmax"),
            options.get("renormalize", True),
            options.get("weight_scale", 1.0),
            options.get("num_groups", 1),
            options.get("num_groups_per_token", 1),
            options.get("group_score", "top2") == "top2",
        )

    def _grouped_experts(self, i: Instruction) -> None:
        x, weights, experts, gate_up, down, gate_up_bias, down_bias = i.inputs
        out, *buffers = i.outputs
        self._program.grouped_experts(
            self._view(out),
            self._view(x),
            self._view(weights),
            self._view(experts),
            [self._view(buffer) for buffer in buffers],
            self._stack(gate_up, i.op),
            self._stack(down, i.op),
            self._floats(gate_up_bias),
            self._floats(down_bias),
            i.attrs["activation"],
            i.attrs["gated"],
            i.attrs["clamp"],
            i.attrs["alpha"],
        )

    def _absorb_keys(self, i: Instruction) -> None:
        query, weight = i.inputs
        [out] = i.outputs
        assert isinstance(query, Value)
        stack = self._stack(weight, i.op, rows=out.head_dim)
        self._program.linear_heads(self._view(out), self._view(query), stack, query.head_step, out.head_dim)

    _expand_values = _absorb_keys

    def _rms_norm(self, i: Instruction) -> None:
        x, weight = i.inputs
        assert isinstance(x, Value)
        out = self._view(i.outputs[0])
        self._program.rms_norm(out, self._view(x), x.head_dim or x.cols, self._floats(weight), i.attrs["eps"])

    def _add_rms_norm(self, i: Instruction) -> None:
        x, residual, weight = i.inputs
        out, total = (self._view(value) for value in i.outputs)
        self._program.add_rms_norm(
            out, total, self._view(x), self._view(residual), self._floats(weight), i.attrs["eps"]
        )

    def _layer_norm(self, i: Instruction) -> None:
        x, weight, bias = i.inputs
        assert isinstance(x, Value)
        self._program.layer_norm(
            self._view(i.outputs[0]),
            self._view(x),
            x.head_dim or x.cols,
            self._floats(weight),
            self._floats(bias),
            i.attrs["eps"],
        )

    def _magnitude(self, i: Instruction) -> None:
        self._program.magnitude(self._view(i.outputs[0]), self._view(i.inputs[0]), i.attrs["centred"])

    def _rotary_angles(self, i: Instruction) -> None:
        _, inv_freq, factors, rows = i.inputs
        assert isinstance(inv_freq, ParamRef)
        num_variants, half = (1 if rows is None else inv_freq.shape[0]), inv_freq.shape[1]
        cos, sin = (self._view(value) for value in i.outputs)
        self._program.rotary_angles(
            cos,
            sin,
            self._floats(inv_freq)[: num_variants * half],
            self._floats(factors)[:num_variants],
            i.attrs["axes"],
        )

    def _rope(self, i: Instruction) -> None:
        x, cos, sin = i.inputs
        assert isinstance(x, Value)
        self._program.rope(
            self._view(i.outputs[0]),
            self._view(x),
            self._view(cos),
            self._view(sin),
            x.head_dim,
            x.head_step,
            i.attrs["interleaved"],
        )

    def _write_kv(self, i: Instruction) -> None:
        cache, key, value, slots = i.inputs
        assert isinstance(cache, CacheRef) and isinstance(slots, InputRef)
        self._program.write_kv(self._caches[cache], self._view(key), self._view(value), slots.group)

    def _paged_attention(self, i: Instruction) -> None:
        query, cache, _, _, table, sinks, slopes, bias = i.inputs
        assert isinstance(cache, CacheRef) and isinstance(table, InputRef)
        self._program.paged_attention(
            self._view(i.outputs[0]),
            self._view(query),
            self._caches[cache],
            table.group,
            i.attrs["scale"],
            i.attrs["window"],
            i.attrs["softcap"],
            self._floats(sinks),
            self._floats(slopes),
            self._biases(bias, both_ways=False),
            i.attrs["sees"],
            i.attrs["chunk"],
        )

    def _encoder_attention(self, i: Instruction) -> None:
        query, key, value, _, bias = i.inputs
        assert isinstance(key, Value)
        cache = self._own_cache(key)
        self._program.write_kv(cache, self._view(key), self._view(value), _ops.OWN_ROWS)
        self._program.paged_attention(
            self._view(i.outputs[0]),
            self._view(query),
            cache,
            _ops.OWN_ROWS,
            i.attrs["scale"],
            i.attrs["window"],
            i.attrs["softcap"],
            relative_bias=self._biases(bias, both_ways=True),
            sees="all",
        )

    def _features(self, i: Instruction) -> None:
        self._program.features(self._view(i.outputs[0]))

    def _stack_rows(self, i: Instruction) -> None:
        x, windows = i.inputs
        assert isinstance(windows, InputRef)
        self._program.stack_rows(self._view(i.outputs[0]), self._view(x), windows.group, windows.cols)

    def _mean_rows(self, i: Instruction) -> None:
        self._program.mean_rows(self._view(i.outputs[0]), self._view(i.inputs[0]))

    # ---- states -------------------------------------------------------------------------------------------
    def _causal_conv(self, i: Instruction) -> None:
        x, weight, bias, state, _, from_slots, _ = i.inputs
        assert isinstance(state, StateRef) and isinstance(from_slots, InputRef)
        self._program.causal_conv(
            self._view(i.outputs[0]),
            self._view(x),
            self._states[state],
            from_slots.group,
            self._floats(weight),
            self._floats(bias),
            i.attrs["width"],
            i.attrs["is_silu"],
        )

    def _selective_scan(self, i: Instruction) -> None:
        *inputs, a_log, d, dt_bias, state, _, from_slots, _ = i.inputs
        x, _, b, _ = inputs
        assert isinstance(x, Value) and isinstance(b, Value)
        assert isinstance(state, StateRef) and isinstance(from_slots, InputRef)
        self._program.selective_scan(
            self._view(i.outputs[0]),
            [self._view(value) for value in inputs],
            self._states[state],
            from_slots.group,
            x.num_heads,
            b.num_heads,
            self._rates(a_log),
            self._floats(d),
            self._floats(dt_bias),
            i.attrs["dt_min"],
            i.attrs["dt_max"],
        )

    def _gated_delta(self, i: Instruction) -> None:
        *inputs, a_log, dt_bias, state, _, from_slots, _ = i.inputs
        _, key, value, _, _ = inputs
        assert isinstance(key, Value) and isinstance(value, Value)
        assert isinstance(state, StateRef) and isinstance(from_slots, InputRef)
        self._program.gated_delta(
            self._view(i.outputs[0]),
            [self._view(each) for each in inputs],
            self._states[state],
            from_slots.group,
            value.num_heads,
            key.num_heads,
            self._rates(a_log),
            self._floats(dt_bias),
            i.attrs["beta_scale"],
        )

    def _wkv(self, i: Instruction) -> None:
        key, value, a_log, bonus, state, _, from_slots, _ = i.inputs
        assert isinstance(state, StateRef) and isinstance(from_slots, InputRef)
        self._program.wkv(
            self._view(i.outputs[0]),
            [self._view(key), self._view(value)],
            self._states[state],
            from_slots.group,
            self._rates(a_log),
            self._floats(bonus),
        )

    def _lru_inputs(self, i: Instruction) -> None:
        taken, dt, one = (self._view(value) for value in i.outputs)
        x, input_gates, decay_gates = (self._view(value) for value in i.inputs[:3])
        input_bias, decay_bias, log_rate = (self._floats(vector) for vector in i.inputs[3:6])
        self._program.lru_inputs(taken, dt, one, x, input_gates, decay_gates, input_bias, decay_bias, log_rate)

    # ---- elementwise and shapes ---------------------------------------------------------------------------
    def _add(self, i: Instruction) -> None:
        self._program.add(self._view(i.outputs[0]), self._view(i.inputs[0]), self._view(i.inputs[1]))

    def _scale(self, i: Instruction) -> None:
        self._program.scale(self._view(i.outputs[0]), self._view(i.inputs[0]), i.attrs["factor"])

    def _softcap(self, i: Instruction) -> None:
        self._program.softcap(self._view(i.outputs[0]), self._view(i.inputs[0]), i.attrs["cap"])

    def _act(self, i: Instruction) -> None:
        self._program.act(self._view(i.outputs[0]), self._view(i.inputs[0]), i.attrs["activation"])

    def _act_mul(self, i: Instruction) -> None:
        self._program.act_mul(self._view(i.outputs[0]), self._view(i.inputs[0]), i.attrs["activation"])

    def _cast(self, i: Instruction) -> None:
        self._program.cast(self._view(i.outputs[0]), self._view(i.inputs[0]))

    def _modulate(self, i: Instruction) -> None:
        x, y = i.inputs
        factors = self._view(y) if isinstance(y, Value) else self._floats(y)
        self._program.modulate(self._view(i.outputs[0]), self._view(x), factors, i.attrs["is_gate"])

    def _xielu(self, i: Instruction) -> None:
        x, alpha_p, alpha_n = i.inputs
        [positive], [negative] = self._floats(alpha_p), self._floats(alpha_n)
        self._program.xielu(self._view(i.outputs[0]), self._view(x), positive, negative)

    def _clamp(self, i: Instruction) -> None:
        self._program.clamp(self._view(i.outputs[0]), self._view(i.inputs[0]), i.attrs["limit"])

    def _log_growth(self, i: Instruction) -> None:
        attrs = i.attrs
        self._program.log_growth(self._view(i.outputs[0]), attrs["factor"], attrs["length"], attrs["shift"])

    def _concat(self, i: Instruction) -> None:
        [out], column = i.outputs, 0
        for part in i.inputs:
            assert isinstance(part, Value)
            place = replace(
                out,
                column=out.column + column,
                cols=part.cols,
                head_dim=part.head_dim,
                head_stride=out.head_step if out.head_dim else 0,
            )
            self._copy(place, part)
            column += part.width

    def _copy_heads(self, i: Instruction) -> None:
        [x] = i.inputs
        assert isinstance(x, Value)
        self._copy(i.outputs[0], x)

    def _copy(self, out: Value, x: Value) -> None:
        self._program.copy_heads(self._view(out), self._view(x), x.num_heads, x.width, x.head_step, out.head_step)

    def _gather(self, i: Instruction) -> None:
        self._program.gather(self._view(i.outputs[0]), self._view(i.inputs[0]))

    def _place_rows(self, i: Instruction) -> None:
        x, rows, _ = i.inputs
        assert isinstance(rows, RowsRef) and self._images is not None, "rows are kept where images are read"
        self._program.place_rows(self._view(i.outputs[0]), self._view(x), self._images, rows.column, i.attrs["add"])

    def _segment(self, i: Instruction) -> None:
        import torch

        from .segments import run_segment, tensor_of

        owner = weakref.proxy(self)  # the native program keeps what it calls, and is kept by this one

        def resolve(operand: Any) -> Any:
            if isinstance(operand, Value):
                count = len(owner._batch["input_ids" if operand.rows == "tokens" else "logits_indices"])
                return tensor_of(owner._rows(operand, count), operand.dtype, operand.head_dim)
            if isinstance(operand, ParamRef):
                return owner._tensors[operand.name]
            if isinstance(operand, InputRef):
                return torch.from_numpy(owner._batch[operand.field])
            return operand

        def call() -> None:
            attrs = i.attrs
            outputs = [resolve(value) for value in i.outputs]
            run_segment(attrs["definition"], attrs["arguments"], attrs["options"], resolve, outputs)

        self._program.call(call)

    # ---- places -------------------------------------------------------------------------------------------
    def _view(self, value: object) -> _ops.View:
        assert isinstance(value, Value), value
        offset = self._offsets[value.buffer] + value.column * _ELEMENT_BYTES[value.dtype]
        dtype = "float32" if value.dtype == "int32" else value.dtype  # numbers of four bytes
        return _ops.View(offset, value.span, value.stride, dtype, value.rows)

    def _stack(self, param: object, op: str, *, rows: int = 0) -> _ops.Stack:
        """rows: of one matrix in the form that the op reads; 0: all of the parameter's."""
        assert isinstance(param, ParamRef), param
        name = stack_name(param, op)
        rows = rows or param.shape[0] // param.num_stacked
        return _ops.Stack(self._weights[name], param.num_stacked, rows, name in self._quantize_x)

    def _own_cache(self, key: Value) -> _ops.KVCache:
        """For keys and values of this step's rows, which no other step reads; layers of equal heads share it."""
        heads = own_heads(key)
        if heads not in self._own_caches:
            dtype: Any = key.dtype
            self._own_caches[heads] = _ops.KVCache(self._num_own_blocks, OWN_BLOCK_SIZE, *heads, dtype)
        return self._own_caches[heads]

    def _biases(self, param: object, *, both_ways: bool) -> list[float]:
        if param is None:
            return []
        assert isinstance(param, ParamRef), param
        return biases_by_distance(self._vectors[param.name].reshape(param.shape), both_ways=both_ways)

    def _rates(self, a_log: object) -> list[float]:
        assert isinstance(a_log, ParamRef), a_log
        rates: list[float] = np.exp(self._vectors[a_log.name]).ravel().tolist()
        return rates

    def _floats(self, param: object) -> list[float]:
        if param is None:
            return []
        assert isinstance(param, ParamRef), param
        floats: list[float] = self._vectors[param.name].ravel().tolist()
        return floats
