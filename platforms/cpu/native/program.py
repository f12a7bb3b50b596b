"""Lowers a trace to a native program: every value gets a place in the arena, every instruction a record."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.kernels.cpu import _ops

from .arena import plan_arena
from .trace import CacheRef, InputRef, Instruction, ParamRef, Trace, UntraceableOp, Value

Vectors = Mapping[str, npt.NDArray[np.float32]]
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class NativeProgram:
    """A forward pass over fixed weights and caches. `run` computes hidden states and logits of one step.

    quantize_x: products with blocks round each 32 activations to 8 bits, which lets integers do the work. tensors:
    parameters of segments, as torch's.
    """

    def __init__(
        self,
        trace: Trace,
        weights: Mapping[str, _ops.PackedWeight],
        vectors: Vectors,
        caches: Sequence[_ops.KVCache] | Mapping[int, _ops.KVCache],
        *,
        max_tokens: int,
        max_logits: int,
        quantize_x: frozenset[str],
        tensors: Mapping[str, Any] | None = None,
    ) -> None:
        arena = plan_arena(trace, {"tokens": max_tokens, "logits": max_logits})
        self.arena_bytes = arena.num_bytes
        self._offsets = arena.offsets
        self._weights = weights
        self._vectors = vectors
        self._caches = caches
        self._quantize_x = quantize_x
        self._tensors = tensors or {}
        self._batch: Mapping[str, Any] = {}
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
    ) -> None:
        """One step; the arrays are as in ForwardBatch. Results stay in the arena until the next one."""
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
        )

    def logits(self, num_rows: int) -> npt.NDArray[np.float32]:
        """The logits of the last step, float32 [num_rows, vocab_size]. The next step overwrites them."""
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
        self._program.embedding(
            self._view(i.outputs[0]), self._weights[weight.name], of_positions=ids.field == "positions"
        )

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
        out = self._view(i.outputs[0])
        self._program.layer_norm(out, self._view(x), self._floats(weight), self._floats(bias), i.attrs["eps"])

    def _rotary_angles(self, i: Instruction) -> None:
        _, inv_freq, factors, rows = i.inputs
        assert isinstance(inv_freq, ParamRef)
        num_variants, half = (1 if rows is None else inv_freq.shape[0]), inv_freq.shape[1]
        cos, sin = (self._view(value) for value in i.outputs)
        self._program.rotary_angles(
            cos, sin, self._floats(inv_freq)[: num_variants * half], self._floats(factors)[:num_variants]
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
            i.attrs["interleaved"],
        )

    def _write_kv(self, i: Instruction) -> None:
        cache, key, value, slots = i.inputs
        assert isinstance(cache, CacheRef) and isinstance(slots, InputRef)
        self._program.write_kv(self._caches[cache.layer], self._view(key), self._view(value), slots.group)

    def _paged_attention(self, i: Instruction) -> None:
        query, cache, _, _, table, sinks, slopes = i.inputs
        assert isinstance(cache, CacheRef) and isinstance(table, InputRef)
        self._program.paged_attention(
            self._view(i.outputs[0]),
            self._view(query),
            self._caches[cache.layer],
            table.group,
            i.attrs["scale"],
            i.attrs["window"],
            i.attrs["softcap"],
            self._floats(sinks),
            self._floats(slopes),
        )

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

    def _gather(self, i: Instruction) -> None:
        self._program.gather(self._view(i.outputs[0]), self._view(i.inputs[0]))

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
        return _ops.View(offset, value.cols, value.stride, value.dtype, value.rows)

    def _floats(self, param: object) -> list[float]:
        if param is None:
            return []
        assert isinstance(param, ParamRef), param
        floats: list[float] = self._vectors[param.name].ravel().tolist()
        return floats
