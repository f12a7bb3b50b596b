"""Recurrences over positions against float64, and their bits however a request is cut."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

ops = pytest.importorskip("headrace.kernels.cpu._ops", reason="the kernels are not built: pip install -e .")

Array = npt.NDArray[Any]
DTYPES = ("float32", "bfloat16", "float16")
LENGTHS = (5, 1, 0, 33, 2)
NUM_SLOTS = 80


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def softplus(x: Array) -> Array:
    return np.log1p(np.exp(x))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One op. arrays: of all tokens; add(program, out, views, states) makes its record; step(state, arrays of one
    token) is one position in float64; prepare makes states of random numbers."""

    arrays: list[Array]
    out_cols: int
    state_shape: tuple[int, ...]
    add: Callable[[Any, Any, list[Any], Array], None]
    step: Callable[[Array, list[Array]], tuple[Array, Array]]
    has_float32_state: bool = True
    prepare: Callable[[Array], None] = lambda states: None


class Run:
    """A rule over requests that each begin behind slot 1 + r, every third of them at zeros; most states are kept."""

    def __init__(self, kit: Any, dtype: str, rule: Rule) -> None:
        self.kit, self.dtype, self.rule = kit, dtype, rule
        state_dtype = "float32" if rule.has_float32_state else dtype
        states = normal(11, NUM_SLOTS, *rule.state_shape)
        rule.prepare(states)
        self.states = kit.to_dtype(states, state_dtype)
        self.starts = np.cumsum([0, *LENGTHS])

    def from_slot(self, request: int) -> int:
        return -1 if request % 3 == 0 else 1 + request

    def to_slot(self, token: int) -> int:
        return -1 if token % 7 == 5 else 20 + token

    def step(self, tokens: Sequence[range], slots: Sequence[int], states: Array) -> Array:
        """Tokens of some requests in one step, each behind the state in its slot."""
        flat = [token for each in tokens for token in each]
        tape = self.kit.Tape(max(1, len(flat)), self.dtype)
        views = [tape.load(array[flat]) for array in self.rule.arrays]
        out = tape.value(self.rule.out_cols)
        self.rule.add(tape.program, out, views, states)
        to_slots = np.array([self.to_slot(token) for token in flat], np.int32)
        tape.run([len(each) for each in tokens], tables=[np.array(slots, np.int32)[:, None]], slots=[to_slots])
        return tape.read(out, len(flat), self.rule.out_cols)  # type: ignore[no-any-return]

    def check(self) -> None:
        requests = [range(a, b) for a, b in zip(self.starts[:-1], self.starts[1:], strict=True)]
        slots = [self.from_slot(r) for r in range(len(requests))]
        states = self.states.copy()
        found = self.step(requests, slots, states)
        expected, kept = np.zeros(found.shape), self.kit.to_float64(self.states)
        for request, slot in zip(requests, slots, strict=True):
            state = np.zeros(self.rule.state_shape) if slot < 0 else self.kit.to_float64(self.states[slot])
            for token in request:
                arrays = [self.kit.to_float64(array[token]) for array in self.rule.arrays]
                state, expected[token] = self.rule.step(state, arrays)
                if self.to_slot(token) >= 0:
                    kept[self.to_slot(token)] = state
        limit = self.kit.limits[self.dtype]
        assert self.kit.nmse(found, expected) < limit
        assert kept.size == 0 or self.kit.nmse(states, kept) < limit
        self._check_cuts(requests, slots, found, states)

    def _check_cuts(self, requests: list[range], slots: list[int], found: Array, states: Array) -> None:
        """The longest request alone, in two steps, and on other numbers of threads."""
        request, slot = requests[3], slots[3]
        for num_threads in (1, 3):
            ops.set_num_threads(num_threads)
            again = self.states.copy()
            cut = request.start + 20
            first = self.step([range(request.start, cut)], [slot], again)
            rest = self.step([range(cut, request.stop)], [self.to_slot(cut - 1)], again)
            both = np.concatenate([first, rest])
            assert np.array_equal(both, found[request.start : request.stop])
            last = self.to_slot(request.stop - 1)
            assert last >= 0 and np.array_equal(again[last], states[last])


def total_tokens() -> int:
    return sum(LENGTHS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("channels", "width", "is_silu"), [(70, 1, True), (1, 2, False), (70, 3, True), (300, 4, True)]
)
def test_causal_conv(kit: Any, tier: str, dtype: str, channels: int, width: int, is_silu: bool) -> None:
    weight, bias = normal(1, channels, width), normal(2, channels)
    x = kit.to_dtype(normal(3, total_tokens(), channels), dtype)

    def add(program: Any, out: Any, views: list[Any], states: Array) -> None:
        program.causal_conv(out, views[0], states, 0, weight.ravel().tolist(), bias.tolist(), width, is_silu)

    def step(state: Array, arrays: list[Array]) -> tuple[Array, Array]:
        window = np.concatenate([state, arrays[0][None]])
        y = (window * weight.T).sum(0) + bias
        return window[1:], y / (1 + np.exp(-y)) if is_silu else y

    rule = Rule(
        arrays=[x],
        out_cols=channels,
        state_shape=(width - 1, channels),
        add=add,
        step=step,
        has_float32_state=False,
    )
    Run(kit, dtype, rule).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim", "size", "groups"), [(5, 1, 16, 1), (4, 9, 24, 2), (3, 8, 5, 3)])
def test_selective_scan(kit: Any, tier: str, dtype: str, heads: int, dim: int, size: int, groups: int) -> None:
    tokens = total_tokens()
    shapes = [(tokens, heads * dim), (tokens, heads), (tokens, groups * size), (tokens, groups * size)]
    arrays = [kit.to_dtype(normal(seed, *shape), dtype) for seed, shape in enumerate(shapes)]
    rates = np.exp(normal(5, heads, size) if dim == 1 else normal(5, heads, 1))
    d, dt_bias = normal(6, heads), normal(7, heads)

    def add(program: Any, out: Any, views: list[Any], states: Array) -> None:
        vectors = (array.ravel().tolist() for array in (rates, d, dt_bias))
        program.selective_scan(out, views, states, 0, heads, groups, *vectors, 0.1, 1.5)

    def step(state: Array, one: list[Array]) -> tuple[Array, Array]:
        x, dt, b, c = one
        x = x.reshape(heads, dim)
        b, c = (np.repeat(array.reshape(groups, size), heads // groups, 0) for array in (b, c))
        pace = softplus(dt + dt_bias).clip(0.1, 1.5)[:, None]
        state = state * np.exp(-pace * rates)[:, None] + (pace * x)[..., None] * b[:, None]
        return state, ((state * c[:, None]).sum(-1) + d[:, None] * x).ravel()

    rule = Rule(arrays=arrays, out_cols=heads * dim, state_shape=(heads, dim, size), add=add, step=step)
    Run(kit, dtype, rule).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_key_decays", [False, True])
def test_gated_delta(kit: Any, tier: str, dtype: str, has_key_decays: bool) -> None:
    tokens, heads, groups, keys, dim = total_tokens(), 4, 2, 12, 9
    dts = heads * (keys if has_key_decays else 1)
    shapes = [(tokens, groups * keys), (tokens, groups * keys), (tokens, heads * dim), (tokens, dts), (tokens, heads)]
    arrays = [kit.to_dtype(normal(seed, *shape), dtype) for seed, shape in enumerate(shapes)]
    rates, dt_bias = np.exp(normal(5, heads)), normal(6, dts)

    def add(program: Any, out: Any, views: list[Any], states: Array) -> None:
        program.gated_delta(out, views, states, 0, heads, groups, rates.tolist(), dt_bias.tolist(), 2.0)

    def unit(x: Array) -> Array:
        x = x.reshape(groups, keys)
        return np.repeat(x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6), heads // groups, 0)

    def step(state: Array, one: list[Array]) -> tuple[Array, Array]:
        query, key, value, dt, beta = one
        q, k, v = unit(query) * keys**-0.5, unit(key), value.reshape(heads, dim)
        pace = softplus(dt + dt_bias).reshape(heads, -1)
        state = state * np.exp(-rates[:, None] * pace)[..., None]
        news = (v - np.einsum("hk,hkd->hd", k, state)) * (2 / (1 + np.exp(-beta)))[:, None]
        state = state + k[..., None] * news[:, None]
        return state, np.einsum("hk,hkd->hd", q, state).ravel()

    rule = Rule(arrays=arrays, out_cols=heads * dim, state_shape=(heads, keys, dim), add=add, step=step)
    Run(kit, dtype, rule).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "reach"), [(1, 1.0), (70, 60.0), (300, 1.0)])
def test_wkv(kit: Any, tier: str, dtype: str, channels: int, reach: float) -> None:
    """Against sums that are not divided by anything: float64 holds e^400."""
    arrays = [reach * normal(3, total_tokens(), channels), normal(4, total_tokens(), channels)]
    arrays = [kit.to_dtype(array, dtype) for array in arrays]
    rates, bonus = np.exp(normal(5, channels)), normal(6, channels)

    def add(program: Any, out: Any, views: list[Any], states: Array) -> None:
        program.wkv(out, views, states, 0, rates.tolist(), bonus.tolist())

    def prepare(states: Array) -> None:
        states[:, 1] = np.abs(states[:, 1])
        states[::2, 1] = states[::2, 0] = 0

    def step(state: Array, one: list[Array]) -> tuple[Array, Array]:
        (key, value), scale = one, np.exp(state[2])
        sums = state[0] * scale, state[1] * scale
        own = np.exp(key + bonus)
        y = (sums[0] + own * value) / (sums[1] + own)
        sums = sums[0] * np.exp(-rates) + np.exp(key) * value, sums[1] * np.exp(-rates) + np.exp(key)
        top = np.where(state[1] == 0, key, np.maximum(state[2] - rates, key))
        return np.stack([sums[0] / np.exp(top), sums[1] / np.exp(top), top]), y

    rule = Rule(arrays=arrays, out_cols=channels, state_shape=(3, channels), add=add, step=step, prepare=prepare)
    Run(kit, dtype, rule).check()


def test_slots_out_of_range_are_refused(kit: Any) -> None:
    tape = kit.Tape(2, "float32")
    states = np.zeros((3, 1, 4), np.float32)
    tape.program.causal_conv(tape.value(4), tape.load(normal(1, 2, 4)), states, 0, [1.0] * 8, [], 2, True)
    good, table = np.zeros(2, np.int32), np.zeros((1, 1), np.int32)
    tape.run([2], tables=[table], slots=[good])
    with pytest.raises(ValueError, match=r"state slot\[0\] is 3, not in \[-1, 3\)"):
        tape.run([2], tables=[table + 3], slots=[good])
    with pytest.raises(ValueError, match=r"slot_mapping\[0\] is 3"):
        tape.run([2], tables=[table], slots=[good + 3])
    with pytest.raises(ValueError, match="of 1 to 8 positions"):
        tape.program.causal_conv(tape.value(4), tape.value(4), states, 0, [1.0] * 36, [], 9, True)
