"""Random weights for a spec without a checkpoint: tests, benchmarks, and models too large to download for a trial."""

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..models.params import Param
from .load import compute_constant
from .source import HostTensor, LoadedParam, numpy_dtype

_DTYPES = ("float32", "float16", "bfloat16")
_POOL_VALUES = 1_048_573
"""Normal values drawn once and repeated. A prime, so that no two rows of a matrix repeat the same values in step."""


class DummyParams:
    """A ParamSource of random values, a function of (seed, name, shape) alone.

    Matrices are normal with standard deviation 1 / sqrt(in_features), so that activations keep their size; norm
    weights are 1, biases 0. These are final values: plus_one adds nothing.
    """

    def __init__(self, params: Sequence[Param], seed: int, dtype: str) -> None:
        """dtype: float32, float16 or bfloat16, of every tensor but the constants. Raises ConfigError for others."""
        if dtype not in _DTYPES:
            raise ConfigError(f"dummy weights can be {', '.join(_DTYPES)}, not {dtype}")
        self._params = tuple(params)
        self._seed = seed
        self._dtype = dtype
        self._scaled: dict[int, npt.NDArray[Any]] = {}
        """the pool for each number of in_features; a model has few"""
        self._pool = np.random.default_rng(seed).standard_normal(_POOL_VALUES, dtype=np.float32)

    def params(self) -> Sequence[Param]:
        """All declarations, in the order of `__iter__`."""
        return self._params

    def __iter__(self) -> Iterator[LoadedParam]:
        """Each parameter once, made when it is asked for."""
        for param in self._params:
            yield LoadedParam(param=param, tensors=(self._make(param),))

    def _make(self, param: Param) -> HostTensor:
        if param.compute is not None:
            return compute_constant(param)
        if param.kind == "vector":
            is_norm = "norm" in param.name and param.name.endswith(".weight")
            data = from_float32(np.full(param.shape, float(is_norm), dtype=np.float32), self._dtype)
        else:
            data = self._normal(param)
        return HostTensor(name=param.name, dtype=self._dtype, shape=param.shape, data=data)

    def _normal(self, param: Param) -> npt.NDArray[Any]:
        """The pool, scaled, from a place that depends on the name, as often as it takes."""
        start = zlib.crc32(f"{self._seed} {param.name}".encode()) % _POOL_VALUES
        scaled = self._scaled_pool(param.shape[-1])
        data = np.empty(param.num_elements, dtype=scaled.dtype)
        position = 0
        while position < len(data):
            run = scaled[start : start + len(data) - position]
            data[position : position + len(run)] = run
            position, start = position + len(run), 0
        return data.reshape(param.shape)

    def _scaled_pool(self, in_features: int) -> npt.NDArray[Any]:
        if in_features not in self._scaled:
            self._scaled[in_features] = from_float32(self._pool * np.float32(in_features**-0.5), self._dtype)
        return self._scaled[in_features]


def from_float32(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """Values rounded to nearest even in `dtype`, as a HostTensor carries it: bfloat16 as uint16 bits. No NaN."""
    if dtype != "bfloat16":
        return values.astype(numpy_dtype(dtype))
    bits = values.view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(
        np.uint16
    )
