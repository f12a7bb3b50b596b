"""Arrays of a device on the host and back, and how far results may be from what is expected."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.core.ops import OpTable
from headrace.core.self_test import nmse

from .registry import Failed
from .values import HostArray, Value

if TYPE_CHECKING:
    import torch

ROUNDING_SLACK = 1.5
"""How often an op may have the error that comes of rounding alone."""
LARGE = 2000
"""So many values have that error on the average."""


class Excess:
    """How much larger the errors of results of 16 bits are than those of the nearest numbers: of each large result,
    and of all together."""

    def __init__(self) -> None:
        self._ours = self._least = 0.0

    def add(self, got: HostArray, want: HostArray, kind: str, what: str) -> None:
        """Take one result in. kind: its dtype. Raises Failed if its own errors are too large."""
        import torch

        nearest = torch.from_numpy(want).to(getattr(torch, kind)).double().numpy()
        is_finite = np.isfinite(nearest)
        if not is_finite.any():
            return
        ours, least = (float(nmse(values[is_finite], want[is_finite])) for values in (got, nearest))
        self._ours, self._least = self._ours + ours * want.size, self._least + least * want.size
        if want.size >= LARGE:
            self._compare(ours, least, what)

    def check(self) -> None:
        """Raise Failed if the errors of all results together are too large."""
        self._compare(self._ours, self._least, "all cases")

    def _compare(self, ours: float, least: float, what: str) -> None:
        if ours > ROUNDING_SLACK * least:
            words = f"errors are {ours / max(least, 1e-30):.1f} times those of rounding the result"
            raise Failed(f"{what}: {words}; something is rounded before it")


def dtype_name(array: Any) -> str:
    # Numpy has no bfloat16: there, uint16 holds the bits of one.
    name = str(array.dtype).removeprefix("torch.")
    return "bfloat16" if name == "uint16" else name


OUTLIER = 30
"""How many times the root of the allowed mean square error any one value may be off, in units of the larger of
itself and the typical value."""


def compare(got: HostArray, want: HostArray, tolerance: float, what: str) -> float:
    """The error of a result; raises Failed if shape, integers, infinities, the mean square error or one value is
    wrong."""
    if got.shape != want.shape:
        raise Failed(f"{what}: shape {got.shape}, expected {want.shape}")
    if want.dtype.kind in "iu":
        if not np.array_equal(got, want):
            place = tuple(int(i) for i in np.argwhere(got != want)[0])
            raise Failed(f"{what}: {got[place]} at {place}, expected {want[place]}")
        return 0.0
    infinite = np.isinf(want)
    if not np.array_equal(got[infinite], want[infinite].astype(got.dtype)):
        raise Failed(f"{what}: infinities stand at other places")
    error = nmse(got[~infinite], want[~infinite])
    if not error <= tolerance:
        raise Failed(f"{what}: error {error:.1e}, allowed {tolerance:.0e}")
    if finite := want[~infinite].size:
        values = np.abs(want[~infinite])
        typical = np.sqrt(np.square(values).sum() / finite)
        off = np.abs(got[~infinite] - want[~infinite]) / np.maximum(np.maximum(values, typical), 1e-30)
        if not off.max() <= OUTLIER * tolerance**0.5:
            raise Failed(f"{what}: error {error:.1e}, and one value is off by {off.max():.1e} of the typical one")
    return error


def to_slice(ops: OpTable, value: Value, dtype: str) -> Any:
    """An activation, [n, m] or [n, num_heads, head_dim], as part of a split, whose rows may lie apart."""
    rows = value.array.reshape(len(value.array), int(np.prod(value.array.shape[1:])))
    side = np.full((len(rows), 7), 3, np.float32)
    whole_rows = replace(value, array=np.concatenate([side, rows, side], -1))
    _, part, _ = ops.split(to_array(ops, whole_rows, dtype), (7, rows.shape[1], 7))
    return part if value.array.ndim == 2 else ops.split_heads(part, head_dim=value.array.shape[-1])


def to_array(ops: OpTable, value: Any, dtype: str) -> Any:
    """A Value on the device; anything else as it is."""
    if not isinstance(value, Value):
        return value
    array = ops.to_device(value.array)
    return ops.cast(array, dtype=dtype) if value.kind == "activation" else array


def to_numpy(ops: OpTable, array: Any) -> HostArray:
    """A copy of a device array on the host, activations as float32."""
    is_narrow = dtype_name(array) in ("bfloat16", "float16")
    return np.array(ops.to_host(ops.cast(array, dtype="float32") if is_narrow else array))


def is_array(value: object) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")


def wide_copy(ops: OpTable, array: Any, dtype: "torch.dtype") -> "torch.Tensor":
    import torch

    tensor = torch.from_numpy(to_numpy(ops, array))
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]
