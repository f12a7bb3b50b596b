"""Places the buffers of a trace in one block of memory: buffers that are never alive together share a place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.core.weights.source import DTYPE_BYTES
from headrace.kernels.cpu import _ops

from .values import Instruction, Rows, Trace, Value

ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """Byte offset of each buffer, and the bytes of all."""

    offsets: Mapping[int, int]
    num_bytes: int


def max_rows_of(max_tokens: int, max_logits: int) -> Mapping[Rows, int]:
    """The most rows of each kind in a step."""
    return {"tokens": max_tokens, "logits": max_logits, "chunk": min(max_tokens, _ops.CHUNK_TOKENS)}


def plan_arena(trace: Trace, max_rows: Mapping[Rows, int]) -> Arena:
    """First fit by size, largest first, over the lifetimes of the buffers.

    A result lives from its instruction to its last reader; hidden_states and logits live to the end. An
    instruction's results never overlap with what it reads, nor with what a norm or an activation before it reads: a
    program makes one record of those and a linear.
    """
    sizes: dict[int, int] = {}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for at, instruction in enumerate(trace.instructions):
        for value in instruction.outputs:
            sizes[value.buffer] = _align(max_rows[value.rows] * value.stride * DTYPE_BYTES[value.dtype])
            first.setdefault(value.buffer, at)
            last[value.buffer] = at
        for value in _values(instruction):
            last[value.buffer] = max(last[value.buffer], at + _may_join_a_linear(instruction))
    for value in (trace.hidden_states, trace.logits):
        last[value.buffer] = len(trace.instructions)
    placed: list[tuple[int, int, int]] = []  # (buffer, start, end)
    offsets: dict[int, int] = {}
    for buffer in sorted(sizes, key=lambda b: (-sizes[b], b)):
        alive = sorted(
            (start, end)
            for other, start, end in placed
            if first[other] <= last[buffer] and first[buffer] <= last[other]
        )
        offset = _first_gap(alive, sizes[buffer])
        offsets[buffer] = offset
        placed.append((buffer, offset, offset + sizes[buffer]))
    return Arena(offsets=offsets, num_bytes=max((end for _, _, end in placed), default=0))


def _may_join_a_linear(instruction: Instruction) -> bool:
    return instruction.op.endswith("norm") or instruction.op in ("act", "act_mul")


def _values(instruction: Instruction) -> list[Value]:
    return [operand for operand in instruction.inputs if isinstance(operand, Value)]


def _first_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    offset = 0
    for start, end in taken:
        if offset + size <= start:
            break
        offset = max(offset, end)
    return offset


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
