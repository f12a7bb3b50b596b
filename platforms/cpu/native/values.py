"""What a trace is made of: values, references to what a step brings, and instructions over them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

SEGMENT = "segment"
"""An instruction that calls the definition of the op in its attributes."""
Rows = Literal["tokens", "logits", "chunk"]
"""Which symbolic size counts a value's rows: num_tokens; those that leave the step (tokens whose logits are needed,
means of a request's rows) or, where an encoder reads frames, those; as many tokens as a mixture of experts takes at
once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """[rows, cols] numbers: columns column : column + cols of a buffer whose rows are `stride` columns long.

    head_dim: the columns are heads of this size; 0: they are not. head_stride: columns of the buffer from one head to
    the next, if there are others between them; 0: there are none.
    """

    buffer: int
    rows: Rows
    cols: int
    column: int
    stride: int
    dtype: str
    head_dim: int = 0
    head_stride: int = 0

    @property
    def num_heads(self) -> int:
        """1 if the columns are no heads."""
        return self.cols // self.width

    @property
    def width(self) -> int:
        """Columns of a head."""
        return self.head_dim or self.cols

    @property
    def head_step(self) -> int:
        """Columns of the buffer from one head to the next."""
        return self.head_stride or self.width

    @property
    def span(self) -> int:
        """Columns of the buffer from the first to the last one, what lies between heads included."""
        return (self.num_heads - 1) * self.head_step + self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamRef:
    """A declared parameter."""

    name: str
    shape: tuple[int, ...]
    num_stacked: int = 0
    """matrices of a stacked parameter; 0: it is none"""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRef:
    """An array of a batch, by field name; `group` where there are several, such as one for each KV group.

    rows, cols: of windows.
    """

    field: str
    group: int = 0
    rows: "Rows" = "tokens"
    cols: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRef:
    """The KV cache of a layer, or that of its cross attention."""

    layer: int
    is_cross: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRef:
    """One array of the states of a layer's recurrence."""

    layer: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsRef:
    """Columns column : column + cols of the rows that are kept of images."""

    column: int
    cols: int


Operand = Value | ParamRef | InputRef | CacheRef | StateRef | RowsRef | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One op: what it reads, what it writes, and its static arguments."""

    op: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Value, ...]
    attrs: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A forward pass: instructions in order, and the values that a step reads from it.

    logits: vectors, where the model makes those.
    """

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
