"""Runs each kernel test on every tier that this CPU has, and compares in float64."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

ops = pytest.importorskip("headrace.kernels.cpu._ops", reason="the kernels are not built: pip install -e .")

Array = npt.NDArray[Any]
GUARD = 64


@pytest.fixture(params=ops.supported_tiers())
def tier(request: pytest.FixtureRequest) -> Iterator[str]:
    """The tier that the test runs on."""
    before = ops.isa()
    ops.set_isa(request.param)
    yield request.param
    ops.set_isa(before)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    ops.set_num_threads(2)
    yield
    ops.set_num_threads(1)


def to_dtype(values: Array, dtype: str) -> Array:
    """float64 or float32 to float32, float16 or the bits of bfloat16, to nearest even."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    words = values.astype(np.float32).view(np.uint32)
    return ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)


def to_float64(values: Array) -> Array:
    """What the numbers of a kernel's array mean."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return values.astype(np.float64)


def nmse(actual: Array, expected: Array) -> float:
    """Mean square error by the mean square of what is expected."""
    power = float(np.mean(expected**2)) or 1.0
    return float(np.mean((to_float64(actual) - expected) ** 2)) / power


LIMITS = {"float32": 1e-9, "float16": 5e-6, "bfloat16": 1e-4}
"""The conformance kit's bounds (architecture.md)."""


class Guarded:
    """An output array between guard words; poisoned, so that a number that is not written shows."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        kind = np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
        size = int(np.prod(shape)) * kind.itemsize
        self._buffer = np.full(size + 2 * GUARD, 0xA5, np.uint8)
        inside = self._buffer[GUARD : GUARD + size]
        inside[:] = 0xFF  # a NaN in every float
        self.array: Array = inside.view(kind).reshape(shape)

    def check(self) -> Array:
        """The array, once the guards are found whole."""
        assert (self._buffer[:GUARD] == 0xA5).all(), "written before the array"
        assert (self._buffer[-GUARD:] == 0xA5).all(), "written behind the array"
        return self.array


class Tape:
    """A program whose first records load arrays."""

    def __init__(self, num_rows: int, dtype: str) -> None:
        self.num_rows, self.dtype = num_rows, dtype
        self.program = ops.Program(1 << 24, num_rows, num_rows)
        self._offset = 0
        self._places: list[tuple[Any, int]] = []

    def offset_of(self, view: Any) -> int:
        """Where a value begins."""
        return next(offset for known, offset in self._places if known is view)

    def value(self, cols: int, rows: str = "tokens", dtype: str = "") -> Any:
        """A place of its own."""
        view = ops.View(self._offset, cols, cols, dtype or self.dtype, rows)
        self._places.append((view, self._offset))
        self._offset += (self.num_rows * cols * 4 + 63) // 64 * 64
        return view

    def load(self, array: Array, dtype: str = "") -> Any:
        """A record that puts an array there."""
        rows = np.ascontiguousarray(array).reshape(len(array), -1)
        weight = ops.PackedWeight(dtype or self.dtype, *rows.shape)
        weight.write_dense(0, rows, any_value=True)
        view = self.value(rows.shape[1], dtype=dtype)
        self.program.embedding(view, weight)
        return view

    def read(self, view: Any, num_rows: int, cols: int) -> Array:
        """A value after a run, read into an array with guards."""
        result = Guarded((num_rows, cols), self.dtype)
        self.program.read(result.array, view)
        return result.check()

    def run(self, lens: Sequence[int], **options: Any) -> None:
        """One step of requests of these lengths, whose rows are those that were loaded."""
        ids = np.arange(self.num_rows, dtype=np.int32)
        starts = np.cumsum([0, *lens]).astype(np.int32)
        no_table = [np.zeros((len(lens), 1), np.int32)]
        tables, slots = options.pop("tables", no_table), options.pop("slots", [ids])
        self.program.run(ids, ids, starts, np.diff(starts), tables, slots, np.empty(0, np.int32), **options)


@pytest.fixture
def kit() -> type["Kit"]:
    return Kit


class Kit:
    """What tests share, by a fixture: test folders are no packages."""

    to_dtype = staticmethod(to_dtype)
    to_float64 = staticmethod(to_float64)
    nmse = staticmethod(nmse)
    limits = LIMITS
    Guarded = Guarded
    Tape = Tape
