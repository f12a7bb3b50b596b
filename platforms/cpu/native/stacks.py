"""Stacked weights as the kernels take them: experts as they are, heads of latent attention as two products.

Each matrix of a stack begins a panel of the packed weight.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np

from headrace.core.weights.dequantize import to_float32
from headrace.core.weights.source import HostTensor
from headrace.kernels.cpu import _ops

from .values import Instruction, ParamRef, Trace
from .weights import Layout, choose_layout, layout_of, write

Packed = Mapping[str, tuple[_ops.PackedWeight, Layout]]
READERS = ("grouped_experts", "absorb_keys", "expand_values")
"""Ops that read stacked weights."""


def stack_name(param: ParamRef, op: str) -> str:
    """What the form of a parameter that an op reads is called."""
    return param.name if op == "grouped_experts" else f"{param.name} for {op}"


def readers_of(trace: Trace) -> Mapping[str, Mapping[str, Instruction]]:
    """Of each stacked parameter, an instruction of every op that reads it."""
    found: dict[str, dict[str, Instruction]] = {}
    for instruction in trace.instructions:
        for operand in instruction.inputs if instruction.op in READERS else ():
            if isinstance(operand, ParamRef) and operand.num_stacked:
                found.setdefault(operand.name, {})[instruction.op] = instruction
    return found


def pack_stacks(
    param: ParamRef,
    tensors: Sequence[HostTensor],
    readers: Mapping[str, Instruction],
    dtype: str,
    *,
    keep_blocks: bool,
) -> Packed:
    """The forms of a stacked parameter that its readers need, by `stack_name`.

    tensors: parts stacked along their rows, [num_stacked * out_features, in_features] in all.
    """
    rows, packed = param.shape[0] // param.num_stacked, {}
    for op, instruction in readers.items():
        name = stack_name(param, op)
        match op:
            case "grouped_experts":
                packed[name] = _pack(tensors, param.num_stacked, slice(0, rows), dtype, keep_blocks)
            case "expand_values":
                last = slice(rows - instruction.attrs["v_head_dim"], rows)
                packed[name] = _pack(tensors, param.num_stacked, last, dtype, keep_blocks)
            case _:
                packed[name] = _pack_turned(tensors, param.num_stacked, instruction.attrs["key_dim"], dtype)
    return packed


def stacked_rows(rows: int) -> int:
    """Rows of a packed stack from the first of one matrix to the first of the next."""
    return -(-rows // _ops.PANEL_ROWS) * _ops.PANEL_ROWS


def _pack(
    tensors: Sequence[HostTensor], num_stacked: int, part: slice, dtype: str, keep_blocks: bool
) -> tuple[_ops.PackedWeight, Layout]:
    """Rows `part` of each matrix."""
    layout = choose_layout(tensors, dtype, keep_blocks=keep_blocks)
    rows, padded = sum(tensor.shape[0] for tensor in tensors) // num_stacked, stacked_rows(part.stop - part.start)
    weight = _ops.PackedWeight(layout.format, num_stacked * padded, tensors[0].shape[1], layout.group)
    if part == slice(0, rows) and rows == padded:
        for start, tensor in zip(accumulate((t.shape[0] for t in tensors), initial=0), tensors, strict=False):
            write(weight, layout, start, tensor)
        return weight, layout
    for matrix in range(num_stacked):
        start = matrix * padded
        for tensor in _rows_of(tensors, matrix * rows + part.start, matrix * rows + part.stop):
            write(weight, layout, start, tensor)
            start += tensor.shape[0]
    return weight, layout


def _pack_turned(
    tensors: Sequence[HostTensor], num_stacked: int, num_rows: int, dtype: str
) -> tuple[_ops.PackedWeight, Layout]:
    """The first rows of each matrix as its columns."""
    layout = layout_of(dtype)
    rows, cols = sum(tensor.shape[0] for tensor in tensors) // num_stacked, tensors[0].shape[1]
    padded = stacked_rows(cols)
    weight = _ops.PackedWeight(layout.format, num_stacked * padded, num_rows)
    for matrix in range(num_stacked):
        start = matrix * rows
        values = np.concatenate([to_float32(part) for part in _rows_of(tensors, start, start + num_rows)]).T
        turned = HostTensor(
            name=tensors[0].name, dtype="float32", shape=values.shape, data=np.ascontiguousarray(values)
        )
        write(weight, layout, matrix * padded, turned)
    return weight, layout


def _rows_of(tensors: Sequence[HostTensor], start: int, stop: int) -> Iterator[HostTensor]:
    """Rows of all tensors as one."""
    bounds = pairwise(accumulate((tensor.shape[0] for tensor in tensors), initial=0))
    for (first, last), tensor in zip(bounds, tensors, strict=True):
        if first < stop and start < last:
            yield tensor.rows(slice(max(start, first) - first, min(stop, last) - first))
