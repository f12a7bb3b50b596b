"""Sizes of real models that the cases of an op do not have: large vocabularies, many experts, wide rows."""

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.core.ops import OpTable
from headrace.core.self_test import TOLERANCE
from headrace.core.weights.source import HostTensor

from .arrays import compare, to_array, to_numpy, wide_copy
from .registry import DTYPES, Subject, add_check, need_definitions
from .values import LONG_SUMS, HostArray, Rng, Value, normal, normal32, whole

if TYPE_CHECKING:
    import torch

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


def _check_narrow_sums(dtype: str, subject: Subject) -> str:
    need_definitions()
    import torch

    ops, rng, narrow = subject.ops(dtype), np.random.default_rng(0), getattr(torch, dtype)

    def positive(*shape: int) -> HostArray:
        return rng.random(shape, np.float32)

    def given(*shape: int) -> tuple[Any, "torch.Tensor"]:
        array = to_array(ops, Value("activation", positive(*shape)), dtype)
        return array, wide_copy(ops, array, torch.float64)

    def stacked(count: int, rows: int, columns: int) -> tuple[Any, "torch.Tensor"]:
        values = positive(count * rows, columns) / np.float32(columns)
        packed = ops.pack_stacked([_tensor(values)], num_stacked=count, dtype=dtype, device=subject.place)
        return packed, torch.from_numpy(values).to(narrow).double().view(count, rows, columns)

    worst, allowed = 0.0, LONG_SUMS[dtype]

    def same(what: str, got: Any, want: "torch.Tensor") -> None:
        nonlocal worst
        worst = max(worst, compare(to_numpy(ops, got), want.numpy(), allowed, what))

    x, wide = given(5, 64)
    (up, wide_up), (down, wide_down) = stacked(3, 2 * 2048, 64), stacked(3, 64, 2048)
    routes = [Value("float32", positive(5, 2)), whole([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0]])]
    chosen = [to_array(ops, value, dtype) for value in routes]
    weights, experts = (wide_copy(ops, array, torch.float64) for array in chosen)
    want = OpTable.grouped_experts(wide, weights, experts, wide_up, wide_down)
    same("grouped_experts", ops.grouped_experts(x, chosen[0], chosen[1], up, down), want)
    heads, wide_heads = stacked(2, 512 + 24, 512)
    x, wide = given(5, 2, 512)
    same("absorb_keys", ops.absorb_keys(x, heads), OpTable.absorb_keys(wide, wide_heads))
    got = ops.expand_values(x, heads, v_head_dim=24)
    same("expand_values", got, OpTable.expand_values(wide, wide_heads, v_head_dim=24))
    x, wide = given(900, 65)
    ranges = [ops.to_device(np.array(places, np.int32)) for places in ([0, 7], [900, 800])]
    wide_ranges = [wide_copy(ops, array, torch.float64) for array in ranges]
    same("mean_rows", ops.mean_rows(x, *ranges), OpTable.mean_rows(wide, *wide_ranges))
    (query, wide_query), (key, wide_key), (value, wide_value) = (given(900, 2, 32) for _ in range(3))
    starts = ops.to_device(np.array([0, 700, 900], np.int32))
    want = OpTable.encoder_attention(
        wide_query, wide_key, wide_value, wide_copy(ops, starts, torch.float64), scale=1e-3
    )
    same("encoder_attention", ops.encoder_attention(query, key, value, starts, scale=1e-3), want)
    return f"5 ops, worst error {worst:.1e}, allowed {allowed:.0e}"


def _register() -> None:
    for dtype in DTYPES:
        meaning = "rows and products of a vocabulary of more than 65536 tokens, against float64"
        add_check(f"ops.vocabulary.{dtype}", meaning, partial(_check_vocabulary, dtype))
        meaning = "norms of wide rows, whose sums of squares of one sign a narrow sum would lose, against float64"
        add_check(f"ops.wide_rows.{dtype}", meaning, partial(_check_wide_rows, dtype))
        meaning = "experts, heads of latents, means and attention whose sums of one sign a narrow sum would lose"
        add_check(f"ops.narrow_sums.{dtype}", meaning, partial(_check_narrow_sums, dtype))
        meaning = "a mixture of 8 of 72 experts, the last ones too, against the definition"
        add_check(f"ops.many_experts.{dtype}", meaning, partial(_check_many_experts, dtype))


_register()
