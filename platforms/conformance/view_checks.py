"""Ops over arguments that are parts of a split: their rows may lie apart, as those of queries, keys and gates do."""

from functools import partial
from typing import Any

import numpy as np

from headrace.core.errors import Unsupported
from headrace.core.ops import OpTable
from headrace.core.self_test import TOLERANCE

from .arrays import compare, flat, to_array, to_numpy, to_slice, wide_copy
from .op_checks import BY_DTYPE
from .registry import DTYPES, Subject, add_check, need_definitions
from .values import Value


def _check_views(dtype: str, subject: Subject) -> str:
    need_definitions()
    import torch

    ops, count, missing = subject.ops(dtype), 0, []
    for op, cases in BY_DTYPE.items():
        tried: set[tuple[int, ...]] = set()
        for case in cases(np.random.default_rng(0)):
            places = [place for place, value in enumerate(case.args) if _may_be_part(value)]
            ranks = tuple(case.args[place].array.ndim for place in places)
            if not places or ranks in tried:
                continue
            tried.add(ranks)
            given: list[Any] = [to_array(ops, value, dtype) for value in case.args]
            for place in places:
                given[place] = to_slice(ops, case.args[place], dtype)
            copies = [_wide(ops, array, torch.float64) for array in given]
            try:
                got = getattr(ops, op)(*given, **case.kwargs)
            except (NotImplementedError, Unsupported):  # what its own check calls unsupported
                missing.append(op)
                break
            want = getattr(OpTable, op)(*copies, **case.kwargs)
            mutable = [value.array.shape for value in case.args if isinstance(value, Value) and value.is_mutable]
            what = f"{op}, {case.what}, of parts of a split"
            for result, expected in zip(flat(got), flat(want), strict=True):
                if expected.shape not in mutable:
                    compare(to_numpy(ops, result), expected.numpy(), TOLERANCE[dtype], what)
            count += 1
    return f"{count} cases of {len(BY_DTYPE) - len(missing)} ops"


def _may_be_part(value: object) -> bool:
    """An activation of several rows, and not the smallest, that the op does not write to."""
    if not isinstance(value, Value) or value.kind != "activation" or value.is_mutable:
        return False
    return value.array.ndim in (2, 3) and len(value.array) > 1 and value.array.size > 40


def _wide(ops: Any, value: Any, dtype: Any) -> Any:
    return wide_copy(ops, value, dtype) if hasattr(value, "dtype") else value


def _register() -> None:
    for dtype in DTYPES:
        meaning = "every op over parts of a split, whose rows may lie apart"
        add_check(f"ops.views.{dtype}", meaning, partial(_check_views, dtype))


_register()
