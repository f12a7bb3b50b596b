"""Linears whose weight is a stack of several block types: one linear for each part, with a result of its own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from .values import Instruction, Operand, ParamRef, Trace, Value

Parts = Mapping[str, Sequence[int]]
"""By parameter, the rows of each of its parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Values start : end of a parameter."""

    name: str
    start: int
    end: int


def part_name(name: str, index: int) -> str:
    """What a part of a parameter is called."""
    return f"{name}[{index}]"


def is_separable(trace: Trace, name: str, rows: Sequence[int]) -> bool:
    """True if the parameter is read by linears only, and whoever reads their results reads one part or another, or
    adds something to all of them."""
    buffers = set()
    for instruction in trace.instructions:
        if any(isinstance(operand, ParamRef) and operand.name == name for operand in instruction.inputs):
            if instruction.op != "linear":
                return False
            buffers.add(instruction.outputs[0].buffer)
    read = [(value, i.op) for i in trace.instructions for value in i.inputs if isinstance(value, Value)]
    read += [(trace.hidden_states, ""), (trace.logits, "")]
    return all(
        _part_of(value, rows) is not None or (op == "add" and value.span == sum(rows))
        for value, op in read
        if value.buffer in buffers
    )


def separate(trace: Trace, parts: Parts) -> tuple[Trace, dict[str, Slice]]:
    """The trace with a linear for each part, and which values of a bias the names of its parts stand for."""
    biases: dict[str, Slice] = {}
    moved: dict[int, tuple[int, Sequence[int]]] = {}  # buffer -> (buffer of its first part, rows of the parts)
    num_buffers = trace.num_buffers

    def moved_value(value: Value) -> Value:
        if value.buffer not in moved:
            return value
        first, rows = moved[value.buffer]
        index = _part_of(value, rows)
        assert index is not None, "is_separable was asked"
        return replace(value, buffer=first + index, column=value.column - sum(rows[:index]), stride=rows[index])

    def new_operand(operand: Operand) -> Operand:
        return moved_value(operand) if isinstance(operand, Value) else operand

    def rewritten() -> Iterator[Instruction]:
        nonlocal num_buffers
        for instruction in trace.instructions:
            if instruction.op == "add" and (added := _rows_added(instruction, moved)):
                for start, end in pairwise(accumulate(added, initial=0)):
                    values = [_columns(value, start, end) for value in (*instruction.inputs, *instruction.outputs)]
                    first, second, result = map(moved_value, values)
                    yield replace(instruction, inputs=(first, second), outputs=(result,))
                continue
            inputs = tuple(new_operand(operand) for operand in instruction.inputs)
            rows = _parts_of(instruction, parts)
            if rows is None:
                yield replace(instruction, inputs=inputs)
                continue
            x, weight, bias = inputs
            assert isinstance(weight, ParamRef)
            out = instruction.outputs[0]
            moved[out.buffer] = num_buffers, rows
            for index, (start, end) in enumerate(pairwise(accumulate(rows, initial=0))):
                part = ParamRef(name=part_name(weight.name, index), shape=(end - start, *weight.shape[1:]))
                part_bias = None
                if isinstance(bias, ParamRef):
                    part_bias = ParamRef(name=part_name(bias.name, index), shape=(end - start,))
                    biases[part_bias.name] = Slice(name=bias.name, start=start, end=end)
                result = replace(out, buffer=num_buffers + index, cols=end - start, stride=end - start)
                yield replace(instruction, inputs=(x, part, part_bias), outputs=(result,))
            num_buffers += len(rows)

    instructions = tuple(rewritten())
    return replace(trace, instructions=instructions, num_buffers=num_buffers), biases


def _rows_added(instruction: Instruction, moved: Mapping[int, tuple[int, Sequence[int]]]) -> Sequence[int] | None:
    """The rows of the parts of what an addition reads, if that is all of a linear that becomes several."""
    for value in instruction.inputs:
        if isinstance(value, Value) and value.buffer in moved:
            rows = moved[value.buffer][1]
            return rows if _part_of(value, rows) is None else None
    return None


def _columns(value: Operand, start: int, end: int) -> Value:
    assert isinstance(value, Value), value
    return replace(value, column=value.column + start, cols=end - start, head_dim=0)


def _parts_of(instruction: Instruction, parts: Parts) -> Sequence[int] | None:
    if instruction.op != "linear":
        return None
    weight = instruction.inputs[1]
    assert isinstance(weight, ParamRef)
    return parts.get(weight.name)


def _part_of(value: Value, rows: Sequence[int]) -> int | None:
    """The part in which all columns of a value lie."""
    for index, (start, end) in enumerate(pairwise(accumulate(rows, initial=0))):
        if start <= value.column and value.column + value.span <= end:
            return index
    return None
