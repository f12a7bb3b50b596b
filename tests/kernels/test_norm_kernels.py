"""Norms, rope, activations and gather against float64."""

import math
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest

from headrace.core.models.spec import Activation

ops = pytest.importorskip("headrace.kernels.cpu._ops", reason="the kernels are not built: pip install -e .")

Array = npt.NDArray[Any]
DTYPES = ("float32", "bfloat16", "float16")
SIZES = [(1, 1), (3, 7), (2, 16), (5, 33), (4, 576), (1, 2051)]


def random(kit: Any, shape: tuple[int, ...], dtype: str, seed: int = 0) -> Array:
    result: Array = kit.to_dtype(np.random.default_rng((seed, *shape)).standard_normal(shape) * 2 + 0.3, dtype)
    return result


def rms(x: Array, weight: Array, eps: float) -> Array:
    result: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "n"), SIZES)
def test_norms(kit: Any, tier: str, dtype: str, num_tokens: int, n: int) -> None:
    x, residual = (random(kit, (num_tokens, n), dtype, seed) for seed in (0, 1))
    weight, bias = (np.random.default_rng(seed).standard_normal(n).astype(np.float32) for seed in (2, 3))
    wide = kit.to_float64(x)
    out, total = (kit.Guarded((num_tokens, n), dtype) for _ in range(2))
    ops.rms_norm(out.array, x, weight, 1e-5)
    assert kit.nmse(out.check(), rms(wide, weight, 1e-5)) < kit.limits[dtype]
    ops.add_rms_norm(out.array, total.array, x, residual, weight, 1e-5)
    added = wide + kit.to_float64(residual)
    assert kit.nmse(total.check(), added) < kit.limits[dtype]
    assert kit.nmse(out.check(), rms(kit.to_float64(total.array), weight, 1e-5)) < kit.limits[dtype]
    ops.layer_norm(out.array, x, weight, bias, 1e-5)
    centred = wide - wide.mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight + bias
    assert kit.nmse(out.check(), expected) < kit.limits[dtype]
    ops.layer_norm(out.array, x, None, None, 1e-5)
    if n > 1:
        expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        assert kit.nmse(out.check(), expected) < kit.limits[dtype]


def test_rms_norm_over_heads_and_without_weight(kit: Any, tier: str) -> None:
    x = random(kit, (3, 5, 24), "float32")
    out = kit.Guarded((3, 5, 24), "float32")
    ops.rms_norm(out.array, x, None, 1e-6)
    assert kit.nmse(out.check(), rms(x.astype(np.float64), np.ones(24), 1e-6)) < 1e-9


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim", "rotary_dim"), [(3, 64, 64), (2, 80, 20), (1, 6, 2), (4, 96, 96)])
def test_rope(kit: Any, tier: str, dtype: str, heads: int, head_dim: int, rotary_dim: int, interleaved: bool) -> None:
    tokens, half = 5, rotary_dim // 2
    qkv = random(kit, (tokens, heads + 3, head_dim), dtype)
    x = qkv[:, 1 : heads + 1]  # a slice: tokens are farther apart than their heads need
    angles = np.random.default_rng(1).uniform(-3, 3, (tokens, half))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    out = kit.Guarded((tokens, heads, head_dim), dtype)
    ops.rope(out.array, x, cos, sin, interleaved)
    wide = kit.to_float64(x)
    first, second = (
        (wide[..., 0:rotary_dim:2], wide[..., 1:rotary_dim:2])
        if interleaved
        else (wide[..., :half], wide[..., half:rotary_dim])
    )
    c, s = cos[:, None].astype(np.float64), sin[:, None].astype(np.float64)
    a, b = first * c - second * s, second * c + first * s
    rotated = np.stack([a, b], -1).reshape(*a.shape[:2], -1) if interleaved else np.concatenate([a, b], -1)
    expected = np.concatenate([rotated, wide[..., rotary_dim:]], -1)
    assert kit.nmse(out.check(), expected) < kit.limits[dtype]
    in_place = np.ascontiguousarray(x)
    ops.rope(in_place, in_place, cos, sin, interleaved)
    assert np.array_equal(in_place, out.array)


def erf(x: Array) -> Array:
    return np.vectorize(math.erf)(x)  # type: ignore[no-any-return]


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "gelu_10": lambda x: (x * 0.5 * (1 + erf(x / math.sqrt(2)))).clip(-10, 10),
    "relu6": lambda x: x.clip(0, 6),
    "leaky_relu": lambda x: np.where(x < 0, 0.01 * x, x),
    "hardswish": lambda x: x * (x + 3).clip(0, 6) / 6,
    "mish": lambda x: x * np.tanh(np.log1p(np.exp(x))),
    "laplace": lambda x: 0.5 * (1 + erf((x - 0.707107) / (0.282095 * math.sqrt(2)))),
    "linear": lambda x: x,
    "softplus": lambda x: np.log1p(np.exp(x)),
    "sqrtsoftplus": lambda x: np.sqrt(np.log1p(np.exp(x))),
}


def test_every_activation_has_a_formula() -> None:
    assert set(ACTIVATIONS) == set(get_args(Activation))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize(("num_tokens", "n"), SIZES)
def test_activations(kit: Any, tier: str, activation: str, dtype: str, num_tokens: int, n: int) -> None:
    x = random(kit, (num_tokens, 2 * n), dtype)
    wide = kit.to_float64(x)
    out = kit.Guarded((num_tokens, n), dtype)
    ops.act_mul(out.array, x, activation)
    function = ACTIVATIONS[activation]
    assert kit.nmse(out.check(), function(wide[:, :n]) * wide[:, n:]) < kit.limits[dtype]
    alone = kit.Guarded((num_tokens, 2 * n), dtype)
    ops.act(alone.array, x, activation)
    assert kit.nmse(alone.check(), function(wide)) < kit.limits[dtype]


def test_activations_at_the_edges(kit: Any, tier: str) -> None:
    x = np.array([[-np.inf, -200, -88, -1e-30, 0, 1e-30, 88, 200, np.nan]], np.float32)
    out = kit.Guarded(x.shape, "float32")
    ops.act(out.array, x, "gelu_tanh")
    values = out.check()[0]
    assert np.isnan(values[-1])
    np.testing.assert_array_equal(values[1:3], 0)
    np.testing.assert_allclose(values[3:8], [-0.5e-30, 0, 0.5e-30, 88, 200], rtol=1e-6)
    ops.act(out.array, x, "silu")
    np.testing.assert_allclose(out.check()[0, 1:8], [0, 0, -0.5e-30, 0, 0.5e-30, 88, 200], rtol=1e-6, atol=1e-35)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_batch_or_threads(kit: Any, tier: str, dtype: str) -> None:
    x = random(kit, (9, 578), dtype)
    weight = np.random.default_rng(2).standard_normal(578).astype(np.float32)
    calls: dict[int, list[Callable[[Array, Array], None]]] = {
        578: [lambda o, i: ops.rms_norm(o, i, weight, 1e-5), lambda o, i: ops.layer_norm(o, i, weight, weight, 1e-5)],
        289: [lambda o, i: ops.act_mul(o, i, "silu"), lambda o, i: ops.act_mul(o, i, "gelu_tanh")],
    }
    for n, functions in calls.items():
        for function in functions:
            whole = kit.Guarded((9, n), dtype).array
            function(whole, x)
            for num_threads in (1, 3):
                ops.set_num_threads(num_threads)
                for row in range(9):
                    alone = kit.Guarded((1, n), dtype).array
                    function(alone, x[row : row + 1])
                    assert np.array_equal(alone[0], whole[row])


def test_gather(kit: Any) -> None:
    x = random(kit, (7, 3, 5), "bfloat16")
    out = kit.Guarded((4, 3, 5), "bfloat16")
    ops.gather(out.array, x, np.array([6, 0, 6, 2], np.int32))
    assert np.array_equal(out.check(), x[[6, 0, 6, 2]])
    with pytest.raises(ValueError, match=r"index 7 is not in \[0, 7\)"):
        ops.gather(out.array, x, np.array([6, 0, 7, 2], np.int32))


def test_errors(kit: Any) -> None:
    x = np.zeros((2, 6), np.float32)
    with pytest.raises(ValueError, match="unknown activation 'swish'; known: silu"):
        ops.act(x.copy(), x, "swish")
    with pytest.raises(ValueError, match="odd"):
        ops.act_mul(np.zeros((2, 3), np.float32), np.zeros((2, 7), np.float32), "silu")
    with pytest.raises(ValueError, match="out must have the shape of x"):
        ops.rms_norm(np.zeros((2, 5), np.float32), x, None, 1e-5)
    with pytest.raises(ValueError, match="rotary_dim 8 exceeds head_dim 6"):
        angles = np.zeros((2, 4), np.float32)
        ops.rope(np.zeros((2, 1, 6), np.float32), x.reshape(2, 1, 6), angles, angles)
