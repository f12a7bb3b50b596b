"""Ops without a native form inside a native program: traced by what their definition returns, run in torch.

A segment reads and writes rows of the arena in place. Imported only where a model has one, because torch is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.core.ops import OpTable
from headrace.core.weights.dequantize import to_float32
from headrace.core.weights.source import LoadedParam

NUM_TOKENS, NUM_LOGITS = 3, 2
"""Rows that stand for num_tokens and for the rows of logits while tracing: different, so that a result tells whose it
has."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int32": torch.int32}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

Shape = tuple[int, ...]
Resolve = Callable[[Any], Any]


def result_shapes(
    op: str, arguments: Sequence[Any], options: Mapping[str, Any], stand_in: Callable[[Any], tuple[Shape, str] | None]
) -> list[tuple[Shape, str]] | None:
    """Shape and dtype of each result of an op's definition; None if it returns no arrays.

    stand_in: the shape and dtype of an operand, None for what is passed as it is.
    """

    def substitute(operand: Any) -> Any:
        found = stand_in(operand)
        if found is None:
            return operand
        shape, dtype = found
        if dtype == "int32" and len(shape) == 1:  # of one request: where it starts and ends, or one for each token
            return torch.tensor([0, NUM_TOKENS]) if shape == (2,) else torch.arange(shape[0], dtype=torch.int32)
        return torch.zeros((), dtype=_DTYPES[dtype]).expand(shape)  # takes no memory, whatever the shape

    with torch.inference_mode():
        results = _call(op, arguments, options, substitute)
    results = results if isinstance(results, tuple) else (results,)
    if not all(isinstance(result, torch.Tensor) for result in results):
        return None
    return [(tuple(result.shape), _NAMES[result.dtype]) for result in results]


def run_segment(
    op: str,
    arguments: Sequence[Any],
    options: Mapping[str, Any],
    resolve: Resolve,
    outputs: Sequence[torch.Tensor],
) -> None:
    """Call the definition and write what it returns into `outputs`."""
    with torch.inference_mode():
        results = _call(op, arguments, options, resolve)
        for output, result in zip(outputs, results if isinstance(results, tuple) else (results,), strict=True):
            output.copy_(result)


def tensor_of(rows: npt.NDArray[Any], dtype: str, head_dim: int) -> torch.Tensor:
    """Rows of the arena as a tensor over the same memory, [n, cols] or [n, heads, head_dim]."""
    if dtype == "bfloat16":
        tensor = torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(rows)
    return tensor.view(len(rows), -1, head_dim) if head_dim else tensor


def load_param(loaded: LoadedParam, dtype: str) -> torch.Tensor:
    """A parameter as the definitions take it."""
    ops = OpTable()
    match loaded.param.kind:
        case "linear" | "embedding":
            tensor: torch.Tensor = ops.pack_linear(loaded.tensors, dtype=dtype, device="cpu")
        case "stacked":
            num_stacked = loaded.param.num_stacked
            tensor = ops.pack_stacked(loaded.tensors, num_stacked=num_stacked, dtype=dtype, device="cpu")
        case _:
            tensor = torch.from_numpy(np.concatenate([to_float32(part) for part in loaded.tensors]))
    return tensor


def leaves(value: Any) -> Iterator[Any]:
    """The operands of an op, those in tuples too."""
    if isinstance(value, tuple | list):
        for part in value:
            yield from leaves(part)
    else:
        yield value


def _call(op: str, arguments: Sequence[Any], options: Mapping[str, Any], resolve: Resolve) -> Any:
    def deep(value: Any) -> Any:
        return tuple(deep(part) for part in value) if isinstance(value, tuple | list) else resolve(value)

    return getattr(OpTable, op)(
        *(deep(value) for value in arguments), **{name: deep(value) for name, value in options.items()}
    )
