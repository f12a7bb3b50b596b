"""Triton's recurrences under its interpreter: against the definitions in float64, and the same bits however a request
is cut."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("triton") is None:
    pytest.skip("triton is not installed: pip install 'headrace[cuda]'", allow_module_level=True)

import torch

from headrace.core.ops import OpTable
from headrace.core.self_test import TOLERANCE, nmse
from headrace.kernels.triton.ops import LAUNCHES, TritonOps
from headrace.kernels.triton.tuning import TUNINGS

pytestmark = pytest.mark.usefixtures("one_thread")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SLOTS = 12
Make = Callable[[int, torch.dtype], tuple[list[Any], list[torch.Tensor], torch.Tensor, dict[str, Any]]]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def conv(tokens: int, dtype: torch.dtype) -> Any:
    """Channels of a slice, as a projection's part has them."""
    x = normal(tokens, 3 * 300).to(dtype)[:, 300:600]
    return [x], [normal(300, 1, 4), normal(300)], normal(SLOTS, 3, 300).to(dtype), {"activation": "silu"}


def mamba(tokens: int, dtype: torch.dtype) -> Any:
    parts = normal(tokens, 4 + 16 + 16).to(dtype)
    arrays = [normal(tokens, 70, 1).to(dtype), normal(tokens, 70, seed=1).to(dtype)]
    arrays += [parts[:, 4:20].view(tokens, 1, 16), parts[:, 20:].view(tokens, 1, 16)]
    return arrays, [normal(70, 16), normal(70), normal(70, seed=1)], normal(SLOTS, 70, 1, 16), {}


def one_number(tokens: int, dtype: torch.dtype) -> Any:
    """A channel with a state of one number, as RecurrentGemma's."""
    arrays = [normal(tokens, 70, 1).to(dtype), normal(tokens, 70, seed=1).to(dtype)]
    arrays += [torch.ones(tokens, 1, 1, dtype=dtype)] * 2
    return arrays, [torch.zeros(70), normal(70), normal(70, seed=1)], normal(SLOTS, 70, 1, 1), {}


def mamba2(tokens: int, dtype: torch.dtype) -> Any:
    parts = normal(tokens, 6 * 20 + 2 * 3 * 24 + 6).to(dtype)
    x, b, c, dt = parts[:, :120], parts[:, 120:192], parts[:, 192:264], parts[:, 264:]
    arrays = [x.view(tokens, 6, 20), dt, b.view(tokens, 3, 24), c.view(tokens, 3, 24)]
    limits = {"dt_min": 0.05, "dt_max": 2.0}
    return arrays, [normal(6), normal(6, seed=1), normal(6, seed=2)], normal(SLOTS, 6, 20, 24), limits


def delta(tokens: int, dtype: torch.dtype, *, by_key: bool = False) -> Any:
    arrays = [normal(tokens, 2, 40, seed=seed).to(dtype) for seed in (0, 1)] + [normal(tokens, 4, 37).to(dtype)]
    arrays += [normal(tokens, 4, *[40] * by_key, seed=2).to(dtype), normal(tokens, 4, seed=3).to(dtype)]
    return (
        arrays,
        [normal(4), normal(4 * (40 if by_key else 1), seed=4)],
        normal(SLOTS, 4, 40, 37),
        {"beta_scale": 2.0},
    )


def delta_by_key(tokens: int, dtype: torch.dtype) -> Any:
    return delta(tokens, dtype, by_key=True)


def means(tokens: int, dtype: torch.dtype) -> Any:
    state = normal(SLOTS, 3, 290)
    state[:, 1] = state[:, 1].abs()
    state[3] = 0
    return (
        [normal(tokens, 290).to(dtype), normal(tokens, 290, seed=1).to(dtype)],
        [normal(290), normal(290)],
        state,
        {},
    )


RULES: dict[str, tuple[str, Make]] = {
    "conv": ("causal_conv", conv),
    "mamba": ("selective_scan", mamba),
    "one number": ("selective_scan", one_number),
    "mamba2": ("selective_scan", mamba2),
    "delta": ("gated_delta", delta),
    "delta by key": ("gated_delta", delta_by_key),
    "means": ("wkv", means),
}


def vector(values: Sequence[Any]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    name = next(name for name, kind in DTYPES.items() if kind == dtype)
    assert got.dtype == dtype and got.shape == want.shape
    assert nmse(got.float(), want.double()) <= TOLERANCE[name]


@pytest.mark.parametrize("tuning", ["sm_90", "gfx942"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_requests_side_by_side(rule: str, dtype: torch.dtype, tuning: str) -> None:
    """New and begun requests, one without tokens, padding; states in place, at every token and nowhere."""
    op, make = RULES[rule]
    counts, before = (5, 0, 1, 9, 1), (2, 7, -1, 3, 11)
    tokens = sum(counts) + 2
    arrays, params, state, options = make(tokens, dtype)
    starts = vector([0, 5, 5, 6, 15, 16])
    # The first goes on where it was, the third begins anew, the fourth keeps its end in a slot of its own.
    kept = vector([4, -1, 5, -1, 2, 6, *[-1] * 8, 8, 11, -1, -1])
    slots = vector([[slot, 99] for slot in before])
    wide = [array.double() for array in (*arrays, *params)]
    want_state = state.double()
    want, want_state = getattr(OpTable, op)(*wide, want_state, starts, slots, kept, **options)
    untouched = state[[0, 1, 7, 9, 10]].clone()
    LAUNCHES.clear()
    got, got_state = getattr(TritonOps(TUNINGS[tuning]), op)(*arrays, *params, state, starts, slots, kept, **options)
    assert LAUNCHES[op] == 1 and got_state is state
    close(got[:16], want[:16], dtype)
    written = [2, 4, 5, 6, 8, 11]
    assert (
        nmse(state[written].float(), want_state[written])
        <= TOLERANCE["float32" if op != "causal_conv" else "bfloat16"]
    )
    assert torch.equal(state[[0, 1, 7, 9, 10]], untouched), "nothing else of the cache changes"


@pytest.mark.parametrize("rule", RULES)
def test_bits_do_not_depend_on_the_cut(rule: str) -> None:
    op, make = RULES[rule]
    kernels = TritonOps(TUNINGS["sm_90"])
    outs, states = [], []
    for cut in ((13,), (1,) * 13, (4, 1, 8)):
        arrays, params, state, options = make(13, torch.float16)
        begin, parts = 0, []
        for count in cut:
            rows = [array[begin : begin + count] for array in arrays]
            kept = vector([*[-1] * (count - 1), 2])
            batch = (vector([0, count]), vector([[-1 if begin == 0 else 2]]), kept)
            most = {} if op == "causal_conv" else {"max_query_len": count}
            parts.append(getattr(kernels, op)(*rows, *params, state, *batch, **options, **most)[0])
            begin += count
        outs.append(torch.cat(parts))
        states.append(state[2])
    assert all(torch.equal(outs[0], out) for out in outs)
    assert all(torch.equal(states[0], state) for state in states)


@pytest.mark.parametrize("rule", RULES)
def test_a_step_without_tokens(rule: str) -> None:
    op, make = RULES[rule]
    arrays, params, state, options = make(0, torch.float32)
    old = state.clone()
    batch = (vector([0, 0]), vector([[1]]), vector([]))
    out, state = getattr(TritonOps(TUNINGS["sm_90"]), op)(*arrays, *params, state, *batch, **options)
    assert len(out) == 0 and torch.equal(state, old)


def test_a_convolution_of_one_tap_has_nothing_to_remember() -> None:
    x, weight, bias, empty = normal(5, 6), normal(6, 1, 1), normal(6), torch.zeros(8, 0, 6)
    rows = (vector([0, 3, 5]), vector([[-1], [2]]), vector([1, 2, 3, 4, 5]))
    got, state = TritonOps(TUNINGS["sm_90"]).causal_conv(x, weight, bias, empty, *rows)
    close(got, x * weight[:, 0, 0] + bias, torch.float32)
    assert state is empty
