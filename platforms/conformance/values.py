"""Arguments of ops as data: what a check hands to a device and to the definition alike."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headrace.core.models.params import Param
from headrace.core.models.spec import ModelSpec
from headrace.core.self_test import dummy_weights
from headrace.core.weights.source import LoadedParam, ParamSource

Rng = np.random.Generator
HostArray = npt.NDArray[Any]
ROWS = (0, 1, 3, 17, 130)
"""Token counts: none, one, odd, across a vector's end, large."""
LONG_SUMS = {"float32": 1e-11, "float16": 2e-7, "bfloat16": 2e-5}
"""Errors of sums of many numbers of one sign: none cancels, so that a result may have its own rounding's alone."""


@dataclass(frozen=True, slots=True)
class Value:
    """An array argument. activation: in the dtype under test; float32: always so; index: int32.

    is_mutable: the op may write to it where it does not read.
    """

    kind: Literal["activation", "float32", "index"]
    array: HostArray
    is_mutable: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """One call of an op: arguments in order, keywords, and a name for messages.

    exact_inputs: the definition is run in float32 like the op, because its own rounding is part of it.
    """

    what: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    exact_inputs: bool = False


def normal(rng: Rng, *shape: int) -> Value:
    """Normal numbers in the dtype under test."""
    return Value("activation", rng.standard_normal(shape).astype(np.float32))


def normal32(rng: Rng, *shape: int) -> Value:
    """Normal numbers in float32."""
    return Value("float32", rng.standard_normal(shape).astype(np.float32))


def whole(array: npt.ArrayLike) -> Value:
    """Whole numbers."""
    return Value("index", np.asarray(array, np.int32))


def random_weights(spec: ModelSpec) -> ParamSource:
    """Weights as `dummy_weights` makes them, but with biases and norm weights that differ from value to value: zeros
    and ones would hide that one is missing."""
    return _RandomVectors(dummy_weights(spec))


class _RandomVectors:
    """A ParamSource over another whose vectors are random."""

    def __init__(self, source: ParamSource) -> None:
        self._source = source

    def params(self) -> Sequence[Param]:
        """As the other's."""
        return self._source.params()

    def __iter__(self) -> Iterator[LoadedParam]:
        """Each parameter once."""
        for loaded in self._source:
            if loaded.param.kind != "vector":
                yield loaded
                continue
            [tensor] = loaded.tensors
            rng = np.random.default_rng(zlib.crc32(loaded.param.name.encode()))
            data = tensor.data + np.float32(0.3) * rng.standard_normal(tensor.shape, np.float32)
            yield LoadedParam(param=loaded.param, tensors=(replace(tensor, data=data),))
