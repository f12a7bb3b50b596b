"""The JAX bodies of the ops against the definitions in torch and against numpy in float64."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest
import torch

from headrace.core.models.spec import Activation
from headrace.core.ops import OpTable, op_names
from headrace.core.self_test import TOLERANCE, nmse
from headrace.core.weights.dummy import from_float32
from headrace.core.weights.source import HostTensor

pytest.importorskip("jax", reason="jax is not installed: pip install 'headrace[tpu]'")
import jax.numpy as jnp

from headrace.core.ops.jax import FUNCTIONS
from headrace.core.ops.jax.sampling import _add_half, gumbel_noise
from headrace.core.ops.sampling import gumbel_noise as defined_noise


def normal(*shape: int) -> npt.NDArray[np.float32]:
    """Random values that depend on the shape alone."""
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def ints(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


X, HEADS, ROW = normal(7, 64), normal(7, 3, 16), normal(64)
ANGLES = normal(7, 8)
ENCODER = [normal(300, 6, 16), normal(300, 3, 16), normal(300, 3, 16) + 1, ints(0, 3, 3, 290, 300)]
CASES: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "rms_norm": ("rms_norm", [X, ROW], {"eps": 1e-5}),
    "add_rms_norm": ("add_rms_norm", [X, X[::-1].copy(), ROW], {"eps": 1e-5}),
    "layer_norm": ("layer_norm", [X, ROW, ROW[::-1].copy()], {"eps": 1e-5}),
    "rope": ("rope", [HEADS, np.cos(ANGLES), np.sin(ANGLES)], {}),
    "rope_pairs": ("rope", [HEADS, np.cos(ANGLES[:, :4]), np.sin(ANGLES[:, :4])], {"interleaved": True}),
    "scale": ("scale", [X, 11.3137], {}),
    "softcap": ("softcap", [X, 1.5], {}),
    "gate": ("gate", [X, X[::-1].copy()], {}),
    "mul": ("mul", [X, ROW], {}),
    "clamp": ("clamp", [X], {"limit": 0.5}),
    "lru_inputs": ("lru_inputs", [X, X[::-1].copy(), X + 1, ROW, ROW, ROW, ints(*range(7))], {}),
    "part_identities": ("part_identities", [normal(3, 4), ints(*range(12)).reshape(3, 4)], {"num_experts": 7}),
    "xielu": ("xielu", [X, normal(1), normal(1)], {}),
    "log_growth": ("log_growth", [ints(0, 5, 8191, 8192, 99999)], {"factor": 0.1, "length": 8192, "shift": 1}),
    **{name: ("act_mul", [X], {"activation": name}) for name in get_args(Activation)},
    "logprobs": ("logprobs", [normal(5, 97), ints(3, 0, 96, 4, 7)], {"num_logprobs": 9}),
    "mask": ("apply_token_mask", [normal(2, 40), ints(-7, 3, 99, 255).reshape(2, 2)], {}),
    "bias": ("add_logit_bias", [normal(3, 9), ints(0, 2), ints(8, 1), normal(2)], {}),
    "penalties": (
        "apply_penalties",
        [normal(3, 9), ints(0, 2, 2), ints(8, 1, 3), ints(2, 0, 1), np.abs(normal(3)) + 1, normal(3), normal(3)],
        {},
    ),
    "route": (
        "route_experts",
        [normal(9, 16), normal(16)],
        {"num_experts_per_token": 4, "score": "sigmoid", "num_groups": 4, "num_groups_per_token": 2},
    ),
    "sparsemixer": ("route_experts", [normal(9, 16)], {"num_experts_per_token": 2, "score": "sparsemixer"}),
    "experts": (
        "grouped_experts",
        [
            X,
            np.abs(normal(7, 2)),
            ints(*range(14)).reshape(7, 2) % 5,
            normal(5, 48, 64),
            normal(5, 64, 24),
            normal(240),
            normal(320),
        ],
        {"clamp": 2.0, "alpha": 1.3},
    ),
    **{
        f"encoder_attention_{name}": ("encoder_attention", [*ENCODER, *bias], {"scale": 0.25, **options})
        for name, bias, options in (
            ("plain", [], {}),
            ("window_softcap", [], {"window": 9, "softcap": 2.0}),
            ("bias", [normal(32, 6)], {}),
        )
    },
    "mean_rows": ("mean_rows", [X, ints(0, 2, 6), ints(2, 5, 7)], {}),
    "stack_rows": ("stack_rows", [X, ints(-1, 0, 1, 1, 2, 3, 5, 6, -1).reshape(3, 3)], {}),
    "store_rows": ("store_rows", [normal(9, 64), X, ints(4, -1, 0, 8, 1, 2, 7)], {}),
    "place_rows": ("place_rows", [X, normal(9, 64), ints(4, -1, 0, 8, -1, 2, 7)], {}),
    "place_rows_add": ("place_rows", [X, normal(9, 64), ints(4, -1, 0, 8, -1, 2, 7)], {"add": True}),
    "angles_of_axes": (
        "rotary_angles",
        [ints(*range(14)).reshape(7, 2), normal(1, 4), normal(1)],
        {"axes": (0, 1, 1, 0)},
    ),
    "absorb_keys": ("absorb_keys", [HEADS, normal(3, 24, 32)], {}),
    "expand_values": ("expand_values", [normal(7, 3, 32), normal(3, 24, 32)], {"v_head_dim": 8}),
}


def test_every_op_has_a_body() -> None:
    assert set(op_names()) == set(FUNCTIONS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_bodies_equal_definitions(case: str, dtype: str) -> None:
    op, arguments, options = CASES[case]
    narrow = getattr(torch, dtype)
    inputs = [torch.from_numpy(a) if isinstance(a, np.ndarray) else a for a in arguments]
    if isinstance(inputs[0], torch.Tensor) and inputs[0].is_floating_point() and arguments[0].shape[0] == 7:
        inputs[0] = inputs[0].to(narrow)
        if op in ("add_rms_norm", "gate"):
            inputs[1] = inputs[1].to(narrow)
    elif dtype != "float32":
        pytest.skip("takes float32 only")
    got = FUNCTIONS[op](*[to_jax(a) for a in inputs], **options)
    want = getattr(OpTable, op)(*[widest(a) for a in inputs], **options)
    pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
    for result, expected in pairs:
        if not expected.is_floating_point():
            assert np.array_equal(np.asarray(result), expected.numpy())
            continue
        values, oracle = np.asarray(result.astype(jnp.float32)), expected.numpy()
        assert np.array_equal(np.isinf(values), np.isinf(oracle))
        finite = np.isfinite(oracle)
        assert nmse(values[finite], oracle[finite]) <= TOLERANCE[dtype]


def test_noise_is_the_definitions() -> None:
    rng = np.random.default_rng(0)
    edges = [np.arange(0, 99), np.arange(2**24 - 99, 2**24 + 99), np.arange(2**25 - 99, 2**25 + 99)]
    words = np.concatenate([rng.integers(0, 2**32, 500_000), *edges, np.arange(2**32 - 999, 2**32)]).astype(np.uint64)
    exact = (words.astype(np.float64) + 0.5).astype(np.float32)
    assert np.array_equal(np.asarray(_add_half(jnp.asarray(words.astype(np.uint32)))), exact)
    seeds, positions = ints(1, -5, 123456), ints(0, 7, 100000)
    want = defined_noise(torch.from_numpy(seeds), torch.from_numpy(positions), vocab_size=5000).numpy()
    got = np.asarray(gumbel_noise(jnp.asarray(seeds), jnp.asarray(positions), vocab_size=5000))
    assert np.abs(got - want).max() < 1e-6


@pytest.mark.parametrize("filters", ["none", "all"])
def test_samples_are_the_definitions(filters: str) -> None:
    rows = 24
    logits = normal(rows, 503) * 3
    logits[0] = 0.0
    arrays: list[Any] = [logits, ints(*range(-12, 12)), ints(*range(rows)), np.linspace(0, 2, rows, dtype=np.float32)]
    arrays += [None] * 3
    if filters == "all":
        arrays[4:] = [
            ints(*([0, 1, 5, 503] * 6)),
            np.tile(np.array([1.0, 0.9, 0.5], np.float32), 8),
            np.tile(np.array([0.0, 0.05], np.float32), 12),
        ]
    want = OpTable.sample(*[None if a is None else torch.from_numpy(a) for a in arrays])
    got = FUNCTIONS["sample"](*[None if a is None else jnp.asarray(a) for a in arrays])
    assert np.asarray(got).tolist() == want.tolist()


def test_no_tokens_are_a_batch_too() -> None:
    none = np.zeros((0, 16), np.float32)
    groups = {"num_experts_per_token": 4, "num_groups": 4, "num_groups_per_token": 2}
    weights, experts = FUNCTIONS["route_experts"](jnp.asarray(none), **groups)
    assert weights.shape == experts.shape == (0, 4)
    stacks = jnp.asarray(normal(5, 48, 16)), jnp.asarray(normal(5, 16, 24))
    assert FUNCTIONS["grouped_experts"](jnp.asarray(none), weights, experts, *stacks).shape == (0, 16)
    indices = jnp.zeros((0, 3), jnp.int32)
    assert FUNCTIONS["stack_rows"](jnp.asarray(normal(4, 16)), indices).shape == (0, 48)


def test_a_convolution_of_one_tap_has_nothing_to_remember() -> None:
    x, weight, bias, empty = normal(5, 6), normal(6, 1, 1), normal(6), np.zeros((8, 0, 6), np.float32)
    rows = (ints(0, 3, 5), ints(-1, 2)[:, None], ints(1, 2, 3, 4, 5))
    got, state = FUNCTIONS["causal_conv"](x, weight, bias, empty, *rows)
    np.testing.assert_allclose(got, x * weight[:, 0, 0] + bias, rtol=1e-6, atol=1e-7)
    assert state.shape == empty.shape


def test_padding_is_dropped() -> None:
    last = FUNCTIONS["remember_tokens"](jnp.arange(4), jnp.asarray(ints(2, -1)), jnp.asarray(ints(70, 71)))
    assert np.asarray(last).tolist() == [0, 1, 70, 3]
    logits = jnp.zeros((2, 3))
    biased = FUNCTIONS["add_logit_bias"](logits, jnp.asarray(ints(-1)), jnp.asarray(ints(1)), jnp.ones(1))
    assert not np.asarray(biased).any()


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_linear_and_embedding(stored: str) -> None:
    weight, x = normal(24, 64), normal(5, 64)
    tensor = HostTensor(name="w", dtype=stored, shape=weight.shape, data=from_float32(weight, stored))
    packed = FUNCTIONS["pack_linear"]([tensor, tensor], dtype="float32", device=None)
    rounded = torch.from_numpy(weight).to(getattr(torch, stored)).double().numpy()
    both = np.concatenate([rounded, rounded])
    got = FUNCTIONS["linear"](jnp.asarray(x), packed, jnp.asarray(normal(48)))
    assert nmse(np.asarray(got), x.astype(np.float64) @ both.T + normal(48)) <= TOLERANCE["float32"]
    rows = FUNCTIONS["embedding"](jnp.asarray(ints(0, 47, 3)), packed)
    assert np.array_equal(np.asarray(rows), both[[0, 47, 3]].astype(np.float32))


def test_the_callers_memory_is_copied() -> None:
    array = np.arange(1000, dtype=np.int32)
    sent = FUNCTIONS["to_device"](array)
    array += 1
    assert np.array_equal(np.asarray(sent), np.arange(1000))


def to_jax(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype == torch.bfloat16:
        return jnp.asarray(value.float().numpy()).astype(jnp.bfloat16)
    return jnp.asarray(value.numpy())


def widest(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
