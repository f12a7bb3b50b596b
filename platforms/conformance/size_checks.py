"""Sizes of real models that the cases of an op do not have: large vocabularies, many experts, wide rows."""

from functools import partial
from typing import Any

import numpy as np

from headrace.core.ops import OpTable
from headrace.core.self_test import TOLERANCE
from headrace.core.weights.source import HostTensor

from .op_checks import compare, to_array, to_numpy, wide_copy
from .registry import DTYPES, Subject, add_check, need_definitions
from .values import LONG_SUMS, HostArray, Rng, Value, normal, normal32, whole

VOCAB_SIZE = 70_001
"""More rows than 16 bits count."""
WIDE = 5_121
NUM_EXPERTS = 72


def _tensor(values: HostArray) -> HostTensor:
    return HostTensor(name="weight", dtype="float32", shape=values.shape, data=values)


def _matrix(rng: Rng, rows: int, columns: int) -> HostArray:
    return rng.standard_normal((rows, columns), np.float32) / np.float32(columns**0.5)


def _exact(values: HostArray, dtype: str) -> Any:
    """Weights in float64, rounded to the dtype first."""
    import torch

    return torch.from_numpy(values).to(getattr(torch, dtype)).double()


def _check_vocabulary(dtype: str, subject: Subject) -> str:
    need_definitions()
    import torch

    ops, rng = subject.ops(dtype), np.random.default_rng(0)
    values = _matrix(rng, VOCAB_SIZE, 32)
    weight = ops.pack_linear([_tensor(values)], dtype=dtype, device=subject.place)
    exact = _exact(values, dtype)
    ids = np.array([VOCAB_SIZE - 1, 0, 65_536, 32_768, 40_000], np.int32)
    rows = to_numpy(ops, ops.embedding(ops.to_device(ids), weight))
    compare(rows, exact[torch.from_numpy(ids).long()].numpy(), TOLERANCE[dtype], "rows")
    for num_tokens in (1, 5):
        x = to_array(ops, normal(rng, num_tokens, 32), dtype)
        want = wide_copy(ops, x, torch.float64) @ exact.T
        compare(
            to_numpy(ops, ops.linear(x, weight)), want.numpy(), TOLERANCE[dtype], f"logits of {num_tokens} tokens"
        )
    return f"{VOCAB_SIZE} rows of 32"


def _check_wide_rows(dtype: str, subject: Subject) -> str:
    need_definitions()
    import torch

    ops, rng = subject.ops(dtype), np.random.default_rng(0)
    # Squares have one sign, so that no error of their sum cancels.
    x, y = (Value("activation", rng.uniform(0.5, 1.5, (3, WIDE)).astype(np.float32)) for _ in range(2))
    given = [to_array(ops, value, dtype) for value in (x, y, normal32(rng, WIDE))]
    wide = [wide_copy(ops, array, torch.float64) for array in given]
    allowed = LONG_SUMS[dtype]
    got, total = ops.add_rms_norm(*given, eps=1e-6)
    wide_total = wide_copy(ops, total, torch.float64)
    compare(to_numpy(ops, total), (wide[0] + wide[1]).numpy(), TOLERANCE[dtype], "sum")
    # A sum may be rounded to its dtype before or behind the norm.
    compare(
        to_numpy(ops, got), OpTable.rms_norm(wide_total, wide[2], eps=1e-6).numpy(), TOLERANCE[dtype], "add_rms_norm"
    )
    got = ops.rms_norm(given[0], None, eps=1e-6)
    compare(to_numpy(ops, got), OpTable.rms_norm(wide[0], None, eps=1e-6).numpy(), allowed, "rms_norm")
    return f"3 rows of {WIDE}"


def _check_many_experts(dtype: str, subject: Subject) -> str:
    need_definitions()
    import torch

    ops, rng = subject.ops(dtype), np.random.default_rng(0)
    hidden, size, per_token = 64, 32, 8
    packed, exact = [], []
    for rows, columns in ((2 * size, hidden), (hidden, size)):
        values = _matrix(rng, NUM_EXPERTS * rows, columns)
        packed.append(ops.pack_stacked([_tensor(values)], num_stacked=NUM_EXPERTS, dtype=dtype, device=subject.place))
        exact.append(_exact(values, dtype).view(NUM_EXPERTS, rows, columns))
    for num_tokens in (1, 20):
        chosen = np.argsort(rng.random((num_tokens, NUM_EXPERTS)), -1)[:, :per_token]
        chosen[0] = np.arange(NUM_EXPERTS - per_token, NUM_EXPERTS)[::-1]
        given = [normal(rng, num_tokens, hidden), normal32(rng, num_tokens, per_token), whole(chosen)]
        arrays = [to_array(ops, value, dtype) for value in given]
        want = OpTable.grouped_experts(*(wide_copy(ops, array, torch.float64) for array in arrays), *exact)
        got = to_numpy(ops, ops.grouped_experts(*arrays, *packed))
        compare(got, want.numpy(), TOLERANCE[dtype], f"{num_tokens} tokens")
    return f"{per_token} of {NUM_EXPERTS}"


def _register() -> None:
    for dtype in DTYPES:
        meaning = "rows and products of a vocabulary of more than 65536 tokens, against float64"
        add_check(f"ops.vocabulary.{dtype}", meaning, partial(_check_vocabulary, dtype))
        meaning = "norms of wide rows, whose sums of squares of one sign a narrow sum would lose, against float64"
        add_check(f"ops.wide_rows.{dtype}", meaning, partial(_check_wide_rows, dtype))
        meaning = "a mixture of 8 of 72 experts, the last ones too, against the definition"
        add_check(f"ops.many_experts.{dtype}", meaning, partial(_check_many_experts, dtype))


_register()
