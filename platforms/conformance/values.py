"""Arguments of ops as data: what a check hands to a device and to the definition alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Rng = np.random.Generator
HostArray = npt.NDArray[Any]


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
