"""Mixtures of experts and products of heads against float64, and their bits in any batch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

ops = pytest.importorskip("headrace.kernels.cpu._ops", reason="the kernels are not built: pip install -e .")

Array = npt.NDArray[Any]
NUM_EXPERTS, COUNT = 7, 3
LENGTH = 40
PANEL = ops.PANEL_ROWS


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def stack(kit: Any, matrices: Array, dtype: str) -> tuple[Any, Array]:
    """A packed stack, and what its numbers mean."""
    num, rows, cols = matrices.shape
    padded = -(-rows // PANEL) * PANEL
    weight = ops.PackedWeight(dtype, num * padded, cols)
    meaning = np.empty(matrices.shape)
    for i, matrix in enumerate(matrices):
        if dtype == "int8":
            scales = (np.abs(matrix).max(1) / 127).astype(np.float32)
            codes = np.rint(matrix / scales[:, None]).astype(np.int8)
            weight.write_int8(i * padded, codes, scales)
            meaning[i] = codes * scales[:, None].astype(np.float64)
        elif dtype == "q8_0":
            blocks = np.empty((rows, cols // 32, 34), np.uint8)
            scales = (np.abs(matrix).reshape(rows, -1, 32).max(2) / 127).astype(np.float16)
            codes = np.rint(matrix.reshape(rows, -1, 32) / scales[..., None].astype(np.float32)).clip(-127, 127)
            blocks[..., :2] = scales[..., None].view(np.uint8)
            blocks[..., 2:] = codes.astype(np.int8).view(np.uint8)
            weight.write_blocks(i * padded, blocks.reshape(rows, -1))
            meaning[i] = (codes * scales[..., None].astype(np.float64)).reshape(rows, cols)
        else:
            narrow = kit.to_dtype(matrix, dtype)
            weight.write_dense(i * padded, narrow)
            meaning[i] = kit.to_float64(narrow)
    return ops.Stack(weight, num, rows, dtype == "q8_0"), meaning


def glu(inner: Array, activation: str, clamp: float, alpha: float, gated: bool) -> Array:
    if not gated:
        return np.maximum(inner, 0) ** 2
    gate, up = np.split(inner, 2, -1)
    if clamp:
        gate, up = np.minimum(gate, clamp), up.clip(-clamp, clamp)
        return (up + 1) * gate / (1 + np.exp(-alpha * gate))  # type: ignore[no-any-return]
    return gate / (1 + np.exp(-gate)) * up  # type: ignore[no-any-return]


class Mixture:
    """Experts with random weights, and a step over them."""

    def __init__(self, kit: Any, dtype: str, weight_dtype: str, **options: Any) -> None:
        self.kit, self.dtype, self.options = kit, dtype, options
        self.hidden, self.width = options.pop("hidden", 96), options.pop("width", 40)
        gated = options.get("is_gated", True)
        inner = self.width * (2 if gated else 1)
        self.up, self.wide_up = stack(kit, normal(1, NUM_EXPERTS, inner, self.hidden) * 0.1, weight_dtype)
        self.down, self.wide_down = stack(kit, normal(2, NUM_EXPERTS, self.hidden, self.width) * 0.1, weight_dtype)
        has_bias = options.pop("has_bias", False)
        self.biases = [normal(s, NUM_EXPERTS, n) if has_bias else None for s, n in ((3, inner), (4, self.hidden))]
        self.scales_input = options.pop("scales_input", False)

    def run(self, x: Array, weights: Array, experts: Array, count: int = COUNT) -> Array:
        tape = self.kit.Tape(len(x), self.dtype)
        views = [tape.load(x), tape.load(weights, "float32"), tape.load(experts.view(np.float32), "float32")]
        out = tape.value(self.hidden)
        inner = self.width * (2 if self.options.get("is_gated", True) else 1)
        widths = [inner, self.width, self.hidden, *([self.hidden] if self.scales_input else [])]
        buffers = [tape.value(count * width, "chunk") for width in widths]
        biases = [[] if bias is None else bias.ravel().tolist() for bias in self.biases]
        tape.program.grouped_experts(out, *views, buffers, self.up, self.down, *biases, **self.options)
        tape.run([len(x)])
        return tape.read(out, len(x), self.hidden)  # type: ignore[no-any-return]

    def oracle(self, x: Array, weights: Array, experts: Array) -> Array:
        out = np.zeros((len(x), self.hidden))
        wide = self.kit.to_float64(x)
        sizes = (self.wide_up.shape[1], self.hidden)
        up_bias, down_bias = (
            np.zeros((NUM_EXPERTS, size)) if bias is None else bias.astype(np.float64)
            for bias, size in zip(self.biases, sizes, strict=True)
        )
        for t, row in enumerate(wide):
            for weight, expert in zip(weights[t].astype(np.float64), experts[t], strict=True):
                if expert == NUM_EXPERTS:
                    continue
                given = row * weight if self.scales_input else row
                inner = self.wide_up[expert] @ given + up_bias[expert]
                clamp, gated = self.options.get("clamp", 0.0), self.options.get("is_gated", True)
                middle = glu(inner, "silu", clamp, self.options.get("alpha", 1.702), gated)
                result = self.wide_down[expert] @ middle + down_bias[expert]
                out[t] += result if self.scales_input else weight * result
        return out


def inputs(kit: Any, num_tokens: int, hidden: int, dtype: str) -> tuple[Array, Array, Array]:
    random = np.random.default_rng(num_tokens)
    experts = np.stack([random.permutation(NUM_EXPERTS)[:COUNT] for _ in range(num_tokens)]).astype(np.int32)
    x = kit.to_dtype(random.standard_normal((num_tokens, hidden)), dtype)
    return x, random.uniform(0.1, 1, (num_tokens, COUNT)).astype(np.float32), experts


LIMITS = {"float32": 1e-9, "bfloat16": 3e-4, "float16": 5e-6, "int8": 3e-4, "q8_0": 3e-4}


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("float32", "bfloat16"),
        ("bfloat16", "int8"),
        ("float32", "q8_0"),
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 5, LENGTH, 1100])
def test_experts(kit: Any, tier: str, dtype: str, weight_dtype: str, num_tokens: int) -> None:
    if num_tokens > LENGTH and "emulated" in tier:
        pytest.skip("too slow")
    sizes = {"width": 64} if weight_dtype == "q8_0" else {}
    mixture = Mixture(kit, dtype, weight_dtype, **sizes)
    x, weights, experts = inputs(kit, num_tokens, mixture.hidden, dtype)
    found = mixture.run(x, weights, experts)
    some = slice(0, LENGTH)
    limit = max(LIMITS[dtype], LIMITS.get(weight_dtype, 0))
    assert kit.nmse(found[some], mixture.oracle(x[some], weights[some], experts[some])) < limit
    for row in (0, num_tokens // 2, num_tokens - 1):
        one = slice(row, row + 1)
        for num_threads in (1, 3):
            ops.set_num_threads(num_threads)
            assert np.array_equal(mixture.run(x[one], weights[one], experts[one])[0], found[row])


@pytest.mark.parametrize(
    "options",
    [
        {"has_bias": True, "clamp": 0.5},
        {"clamp": 0.7, "alpha": 1.1},
        {"is_gated": False, "activation": "relu2"},
        {"scales_input": True},
        {"hidden": 33, "width": 7, "has_bias": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kinds_of_experts(kit: Any, tier: str, dtype: str, options: dict[str, Any]) -> None:
    mixture = Mixture(kit, dtype, dtype, **options)
    x, weights, experts = inputs(kit, 9, mixture.hidden, dtype)
    assert kit.nmse(mixture.run(x, weights, experts), mixture.oracle(x, weights, experts)) < LIMITS[dtype]


@pytest.mark.parametrize("scales_input", [False, True])
def test_experts_of_another_rank_add_nothing(kit: Any, tier: str, scales_input: bool) -> None:
    mixture = Mixture(kit, "float32", "float32", scales_input=scales_input)
    x, weights, experts = inputs(kit, 9, mixture.hidden, "float32")
    experts[experts % 2 == 0] = NUM_EXPERTS
    experts[3] = NUM_EXPERTS
    found = mixture.run(x, weights, experts)
    assert kit.nmse(found, mixture.oracle(x, weights, experts)) < LIMITS["float32"]
    assert not found[3].any()


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)  # type: ignore[no-any-return]


def in_groups(choice: Array, score: Callable[[Array], float]) -> Array:
    """Of 12 numbers, those in the best 2 of 4 groups; the rest -inf."""
    groups = choice.reshape(4, 3)
    best = np.argsort([-score(group) for group in groups])[:2]
    return np.where(np.isin(np.arange(4), best)[:, None], groups, -np.inf).ravel()


def route(tape: Any, logits: Array, count: int, **options: Any) -> tuple[Array, Array]:
    view = tape.load(logits, "float32")
    weights, experts = tape.value(count, dtype="float32"), tape.value(count, dtype="float32")
    tape.program.route_experts(weights, experts, view, **options)
    tape.run([len(logits)])
    found = [np.empty((len(logits), count), np.float32) for _ in range(2)]
    tape.program.read(found[0], weights)
    tape.program.read(found[1], experts)
    return found[0], found[1].view(np.int32)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("num_open_groups", [0, 2])
@pytest.mark.parametrize("has_correction", [False, True])
def test_routing(kit: Any, tier: str, score: str, num_open_groups: int, has_correction: bool) -> None:
    logits = normal(5, 30, 12) * 2
    correction = normal(6, 12) * 0.3 if has_correction else None
    options: dict[str, Any] = {"score": score, "weight_scale": 2.5, "renormalize": has_correction}
    if num_open_groups:
        options |= {"num_groups": 4, "num_open_groups": 2, "scores_top2": has_correction}
    if correction is not None:
        options["correction"] = correction.tolist()
    weights, experts = route(kit.Tape(30, "float32"), logits, COUNT, **options)
    wide = logits.astype(np.float64)
    scores = softmax(wide) if score == "softmax" else 1 / (1 + np.exp(-wide))
    for t in range(30):
        choice = scores[t] + (0 if correction is None else correction)
        if num_open_groups:
            choice = in_groups(choice, lambda g: np.sort(g)[-2:].sum() if has_correction else g.max())
        expected = np.argsort(-choice)[:COUNT]
        assert experts[t].tolist() == expected.tolist()
        factors = scores[t][expected]
        np.testing.assert_allclose(
            weights[t], 2.5 * (factors / factors.sum() if has_correction else factors), rtol=2e-6
        )


def test_routing_by_masked_softmaxes(kit: Any, tier: str) -> None:
    logits = normal(7, 50, 16) * 0.05 + 1  # near each other, as the mask wants it
    weights, experts = route(kit.Tape(50, "float32"), logits, 2, score="sparsemixer")
    wide = logits.astype(np.float64)
    for t in range(50):
        left = wide[t].copy()
        for j in range(2):
            best = int(left.argmax())
            near = (left[best] - wide[t]) / np.maximum(np.abs(wide[t]), left[best]) <= 0.02
            shares = softmax(np.where(near, left, -np.inf))
            assert experts[t, j] == best
            np.testing.assert_allclose(weights[t, j], shares[best], rtol=2e-6)
            left[best] = -np.inf


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("num_tokens", [1, 3, 130])
def test_products_of_heads(kit: Any, tier: str, dtype: str, num_tokens: int) -> None:
    """Heads that lie apart, and results of which only a part is written."""
    heads, cols, rows, gap = 5, 24, 33, 7
    weights, wide = stack(kit, normal(8, heads, rows, cols), dtype)
    x = kit.to_dtype(normal(9, num_tokens, heads, cols + gap), dtype)
    tape = kit.Tape(num_tokens, dtype)
    source = tape.load(x)
    out = tape.load(np.zeros((num_tokens, heads * (rows + gap)), x.dtype))
    stride = heads * (cols + gap)
    part = ops.View(0, stride - gap, stride, dtype)
    target = ops.View(tape.offset_of(out), heads * (rows + gap) - gap, heads * (rows + gap), dtype)
    del source
    tape.program.linear_heads(target, part, weights, cols + gap, rows + gap)
    tape.run([num_tokens])
    found = tape.read(out, num_tokens, heads * (rows + gap)).reshape(num_tokens, heads, rows + gap)
    expected = np.einsum("thd,hrd->thr", kit.to_float64(x)[..., :cols], wide, optimize=True)
    assert kit.nmse(found[..., :rows], expected) < kit.limits[dtype]
    assert not kit.to_float64(found[..., rows:]).any()
