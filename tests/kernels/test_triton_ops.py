"""Triton kernels under Triton's interpreter against the definitions, with ragged, odd and empty shapes."""
# pyright: reportMissingImports=false

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, get_args

import pytest

if find_spec("triton") is None:
    pytest.skip("triton is not installed: pip install 'headrace[cuda]'", allow_module_level=True)

import numpy as np
import torch

from headrace.core.models.spec import Activation
from headrace.core.ops import OpTable
from headrace.core.ops.attention import Integers
from headrace.core.ops.moe import glu
from headrace.core.ops.sampling import gumbel_noise
from headrace.core.self_test import TOLERANCE, nmse
from headrace.core.weights.dequantize import to_float32
from headrace.core.weights.quantize import CODES, FP8, INT4, INT8, INT8_GROUPS, Scheme, quantize_rows, to_float8
from headrace.core.weights.source import HostTensor
from headrace.kernels.triton.ops import LAUNCHES, TritonOps
from headrace.kernels.triton.quantized import QuantizedWeight, quantized_linear_kernel
from headrace.kernels.triton.tuning import TUNINGS, Tuning, tuning_for
from headrace.platforms.gpu.packing import pack_linear, pack_stacked, packed_bytes

TINY = Tuning(
    name="test",
    query_rows=16,
    keys=16,
    split_keys=32,
    row_values=64,
    expert_rows=32,
    expert_cols=16,
    expert_depth=32,
    linear_rows=32,
    linear_cols=32,
    few_cols=16,
)
OPS = TritonOps(TINY, wide_dot=True)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def nan_where_nothing_was_written(request: pytest.FixtureRequest) -> Iterator[None]:
    """Memory that nobody fills holds NaN and the largest integers; what computes with it warns or is wrong."""
    fills = "far" not in request.node.name and "2_31" not in request.node.name
    torch.use_deterministic_algorithms(fills)
    assert torch.empty(1).isnan().all() or not fills
    yield
    torch.use_deterministic_algorithms(False)


def values(*shape: int, dtype: str = "float32", seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])


def check(got: torch.Tensor, want: torch.Tensor, dtype: str) -> None:
    assert got.dtype == want.dtype
    assert nmse(got.float().numpy(), want.double().numpy()) <= TOLERANCE[dtype]


def wide(*arguments: Any) -> list[Any]:
    return [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (5, 33), (3, 130)])
def test_norms(dtype: str, shape: tuple[int, int]) -> None:
    x, residual = values(*shape, dtype=dtype), values(*shape, dtype=dtype, seed=1)
    weight, bias = values(shape[1], seed=2), values(shape[1], seed=3)
    for w in (weight, None):
        check(OPS.rms_norm(x, w, eps=1e-5), OpTable.rms_norm(*wide(x, w), eps=1e-5).to(x.dtype), dtype)
    got, total = OPS.add_rms_norm(x, residual, weight, eps=1e-5)
    check(total, x + residual, dtype)  # the interpreter cuts bfloat16 off where a GPU rounds it
    check(got, OpTable.rms_norm(*wide(total, weight), eps=1e-5).to(x.dtype), dtype)
    for w, b in ((weight, bias), (weight, None), (None, None)):
        check(OPS.layer_norm(x, w, b, eps=1e-5), OpTable.layer_norm(*wide(x, w, b), eps=1e-5).to(x.dtype), dtype)


def test_a_norm_of_heads_reads_a_slice_in_place() -> None:
    heads = OpTable.split_heads(OpTable.split(values(5, 7 * 16), (48, 64))[0], head_dim=16)
    weight = values(16)
    check(OPS.rms_norm(heads, weight, eps=1e-6), OpTable.rms_norm(heads, weight, eps=1e-6), "float32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "rotary_dim"), [(0, 2, 8, 8), (3, 5, 20, 20), (2, 3, 80, 32)]
)
def test_rope(dtype: str, interleaved: bool, tokens: int, heads: int, head_dim: int, rotary_dim: int) -> None:
    x = values(tokens, 2 * heads, head_dim, dtype=dtype)[:, heads:]
    angles = values(tokens, rotary_dim // 2)
    got = OPS.rope(x, angles.cos(), angles.sin(), interleaved=interleaved)
    want = OpTable.rope(*wide(x, angles.cos(), angles.sin()), interleaved=interleaved)
    check(got, want.to(x.dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_activations(dtype: str, activation: Any) -> None:
    for rows, n in ((0, 3), (1, 1), (3, 70)):
        x = 3 * values(rows, 2 * n, dtype=dtype)
        want = OpTable.act_mul(x.double(), activation=activation).to(x.dtype)
        check(OPS.act_mul(x, activation=activation), want, dtype)
        check(OPS.act(x, activation=activation), OpTable.act(x.double(), activation=activation).to(x.dtype), dtype)
    extreme = torch.tensor([[-1e4, -50.0, 0.0, 50.0, 1e4]])
    check(
        OPS.act(extreme, activation=activation), OpTable.act(extreme.double(), activation=activation).float(), dtype
    )


def test_rows_are_gathered() -> None:
    for shape in ((9, 65), (9, 2, 3), (4, 1)):
        x = values(*shape)
        for indices in ([], [0], [3, 3, 1, 0]):
            picked = torch.tensor(indices, dtype=torch.int32)
            assert torch.equal(OPS.gather(x, picked), x[picked.long()])
    assert torch.equal(OPS.embedding(torch.tensor([8, 0], dtype=torch.int32), values(9, 65)), values(9, 65)[[8, 0]])


@pytest.mark.parametrize("interpreted_values", [0, 64, 1 << 10], ids=["gpu", "some", "all"])
def test_programs_have_several_rows_and_the_last_one_fewer(interpreted_values: int) -> None:
    """5 programs of 8 rows, as on a GPU and under an interpreter that takes as many values; and one of 64."""
    num_rows, n = 37, 8
    ops = TritonOps(replace(TINY, interpreted_values=interpreted_values), wide_dot=True)
    assert ops.rows(num_rows, n) == (64 if interpreted_values > 64 else 8)
    x = values(num_rows, 2 * n)
    assert torch.equal(ops.act(x[:, :n], activation="relu"), x[:, :n].relu())
    check(ops.act_mul(x, activation="silu"), OpTable.act_mul(x, activation="silu"), "float32")
    check(ops.rms_norm(x[:, :n], None, eps=1e-5), OpTable.rms_norm(x[:, :n], None, eps=1e-5), "float32")
    indices = values(num_rows, seed=1).argsort().to(torch.int32)
    assert torch.equal(ops.gather(x, indices), x[indices.long()])
    heads, angles = x.view(num_rows, 4, 4), values(num_rows, 1)
    got, want = (op(heads, angles.cos(), angles.sin()) for op in (ops.rope, OpTable.rope))
    check(got, want, "float32")
    slots = torch.where(indices % 5 == 0, -1, indices)
    cache = torch.zeros(10, 4, 2, 4), torch.zeros(10, 4, 2, 4)
    ops.write_kv(cache, heads[:, :2], heads[:, 2:], slots)
    for part, given in zip(cache, (heads[:, :2], heads[:, 2:]), strict=True):
        want = torch.zeros(40, 2, 4)
        want[slots[slots >= 0].long()] = given[slots >= 0]
        assert torch.equal(part.view(40, 2, 4), want)


def test_the_interpreter_is_set_up_once_for_each_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself it goes through hundreds of names at every call of every function."""
    from triton.runtime import interpreter

    x, replaced = values(3, 70), list[Any]()
    OPS.rms_norm(x, None, eps=1e-5)
    monkeypatch.setattr(interpreter, "_patch_builtin", lambda *args: replaced.append(args))
    OPS.rms_norm(x, None, eps=1e-5)
    assert not replaced


# ---- mixtures of experts --------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "num_experts", "per_token", "hidden", "size"),
    [(0, 3, 2, 8, 4), (1, 1, 1, 5, 3), (7, 4, 2, 33, 18), (40, 3, 2, 16, 70), (5, 9, 3, 20, 20)],
)
def test_mixtures_of_experts(
    dtype: str, tokens: int, num_experts: int, per_token: int, hidden: int, size: int
) -> None:
    x = values(tokens, hidden, dtype=dtype)
    gate_up = values(num_experts, 2 * size, hidden, dtype=dtype, seed=1) / hidden**0.5
    down = values(num_experts, hidden, size, dtype=dtype, seed=2) / size**0.5
    weights = values(tokens, per_token, seed=3).softmax(-1)
    experts = values(tokens, num_experts, seed=6).argsort(-1)[:, :per_token].to(torch.int32)
    biases = values(num_experts * 2 * size, seed=4), values(num_experts * hidden, seed=5)
    different: list[dict[str, Any]] = [
        {"activation": "silu"},
        {"activation": "gelu_tanh", "scale_input": True},
        {"clamp": 1.5, "gate_up_bias": biases[0], "down_bias": biases[1]},
        {"clamp": 1.5, "alpha": 1.2},
    ]
    for options in (*different, {"gated": False, "activation": "relu2"}):
        up = gate_up if options.get("gated", True) else gate_up[:, :size].contiguous()
        arguments = (x, weights, experts, up, down)
        got = OPS.grouped_experts(*arguments, **options)
        want = OpTable.grouped_experts(*wide(*arguments), **dict(zip(options, wide(*options.values()), strict=True)))
        check(got, want.to(x.dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{"activation": "relu2"}, {"activation": "linear", "partial": True}])
def test_experts_without_gates_and_with_outputs_of_another_size(dtype: str, options: dict[str, Any]) -> None:
    x, weights = values(40, 33, dtype=dtype), values(40, 1, seed=1)
    up, down = values(3, 18, 33, dtype=dtype, seed=2) / 6, values(3, 50, 18, dtype=dtype, seed=3) / 4
    experts = torch.arange(40, dtype=torch.int32)[:, None] % (4 if options.get("partial") else 3)
    got = OPS.grouped_experts(x, weights, experts, up, down, gated=False, **options)
    exact = wide(x, up, down, weights)
    inner = torch.einsum("eri,ti->ter", exact[1], exact[0])
    inner = inner.clamp(min=0) ** 2 if options["activation"] == "relu2" else inner
    all_outputs = torch.einsum("eor,ter->teo", exact[2], inner) * exact[3][:, None]
    want = torch.cat([all_outputs, torch.zeros(40, 1, 50, dtype=torch.float64)], 1)[torch.arange(40), experts[:, 0]]
    check(got, want.to(x.dtype), dtype)


def test_all_tokens_may_choose_one_expert() -> None:
    x, weights = values(50, 16), torch.ones(50, 1)
    gate_up, down = values(8, 24, 16, seed=1), values(8, 16, 12, seed=2)
    for expert in (0, 7):
        experts = torch.full((50, 1), expert, dtype=torch.int32)
        want = OpTable.grouped_experts(x.double(), weights.double(), experts, gate_up.double(), down.double())
        check(OPS.grouped_experts(x, weights, experts, gate_up, down), want.float(), "float32")


# ---- quantized weights ----------------------------------------------------------------------------------------
BLOCKS = Scheme(name="fp8", group=32)
SCHEMES = {**INT4, "int8": INT8_GROUPS, "int8-channel": INT8, "fp8": FP8, "fp8 by block": BLOCKS}


def quantized(rows: int, columns: int, scheme: Scheme, seed: int) -> HostTensor:
    """A random weight as `--quantize` leaves it, or in float8 with a scale for each block, as DeepSeek-V3 has it."""
    numbers = values(rows, columns, seed=seed).numpy() / columns**0.5 + np.float32(0.02)
    if scheme.name == "fp8" and scheme.group:
        runs = numbers.reshape(rows, -1, scheme.group)
        tall = np.abs(runs).max(-1)
        for start in range(0, rows, 16):
            tall[start : start + 16] = tall[start : start + 16].max(0)
        scales = tall / np.float32(448)
        codes = to_float8((runs / scales[..., None]).reshape(rows, columns))
        return HostTensor(name="weight", dtype="float8_e4m3fn", shape=codes.shape, data=codes, scales=scales)
    codes, scales, offsets = quantize_rows(numbers, scheme)
    return HostTensor(
        name="weight", dtype=CODES[scheme.name], shape=codes.shape, data=codes, scales=scales, offsets=offsets
    )


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_and_rows_of_quantized_weights(dtype: str, name: str) -> None:
    scheme = SCHEMES[name]
    unit = scheme.group or 7
    for parts, num_groups in (((1,), 2), ((37, 5), 3), ((70,), 4)):
        tensors = [quantized(rows, num_groups * unit, scheme, seed) for seed, rows in enumerate(parts)]
        weight = pack_linear(tensors, dtype=dtype, device="cpu")
        assert isinstance(weight, QuantizedWeight)
        exact = torch.from_numpy(np.concatenate([to_float32(tensor) for tensor in tensors])).double()
        held = [array for array in (weight.codes, weight.scales, weight.offsets) if array is not None]
        assert sum(array.nbytes for array in held) == packed_bytes(tuple(exact.shape), scheme)
        for num_tokens in (0, 1, 16, 17, 70):
            bias = values(len(exact), seed=9) if num_tokens % 2 else None
            wider = values(num_tokens, exact.shape[1] + 3, dtype=dtype, seed=8)
            x = wider[:, 3:]  # rows apart, as a split leaves them
            met = rounded(x, "int8") if name == "int8-channel" else x
            want = OpTable.linear(*wide(met, exact, bias)).to(x.dtype)
            check(OPS.quantized_linear(x, weight, bias), want, dtype)
        picked = torch.tensor([len(exact) - 1, 0, 0], dtype=torch.int32)
        check(OPS.embedding(picked, weight), exact[picked.long()].to(DTYPES[dtype]), dtype)


def met_by(weight: QuantizedWeight, x: torch.Tensor, ops: TritonOps) -> torch.Tensor:
    """float64: x as a product with the weight meets it."""
    if not ops.rounds(weight):
        return x.double()
    kind = ops.tuning.float8 if weight.is_float else "int8"
    group = weight.group or x.shape[-1]
    return rounded(x.reshape(-1, group), kind).reshape(x.shape)


@pytest.mark.parametrize("float8", ["", "e4m3fn", "e4m3fnuz"])
@pytest.mark.parametrize("name", SCHEMES)
def test_experts_of_quantized_weights(name: str, float8: Any) -> None:
    if float8 and not name.startswith("fp8"):
        pytest.skip("the kind of float8 changes nothing")
    dtype = "bfloat16" if name in ("int4", "int4-sym") else "float32"
    ops = TritonOps(replace(TINY, float8=float8), wide_dot=True)
    num_experts, per_token, unit = 5, 2, max(64, SCHEMES[name].group)
    hidden, size = unit, unit if unit > 64 else 3 * SCHEMES[name].group or 96
    packed, exact = [], []
    for seed, (rows, columns) in enumerate(((2 * size, hidden), (hidden, size))):
        tensor = quantized(num_experts * rows, columns, SCHEMES[name], seed)
        weight = pack_stacked([tensor], num_stacked=num_experts, dtype=dtype, device="cpu", float8=float8)
        assert isinstance(weight, QuantizedWeight)
        packed.append(weight)
        exact.append(torch.from_numpy(to_float32(tensor)).double().view(num_experts, rows, columns))
    biases = values(num_experts * 2 * size, seed=4), values(num_experts * hidden, seed=5)
    for num_tokens in (0, 3, 60):
        x = values(num_tokens, hidden, dtype=dtype, seed=6)
        weights = values(num_tokens, per_token, seed=7).softmax(-1)
        experts = values(num_tokens, num_experts, seed=8).argsort(-1)[:, :per_token].to(torch.int32)
        experts[: num_tokens // 2, 0] = num_experts  # of another rank
        choices: tuple[dict[str, Any], ...] = (
            ({"scale_input": True}, {"clamp": 0.8, "alpha": 1.2}) if num_tokens == 3 else ({},)
        )
        for options in choices:
            given = biases if options.get("clamp") else (None, None)
            up_weight, down_weight = packed
            got = ops.grouped_experts(x, weights, experts, up_weight, down_weight, *given, partial=True, **options)
            want = torch.zeros(num_tokens, hidden, dtype=torch.float64)
            met = met_by(packed[0], x, ops)
            for token, expert, factor in (
                (i, e, weights[i, j].double()) for i in range(num_tokens) for j, e in enumerate(experts[i].tolist())
            ):
                if expert == num_experts:
                    continue
                up, down = (None if b is None else b.view(num_experts, -1)[expert].double() for b in given)
                inner = exact[0][expert] @ met[token] * (factor if options.get("scale_input") else 1)
                inner = glu(inner if up is None else inner + up, "silu", options.get("clamp", 0.0), 1.2)
                outer = exact[1][expert] @ met_by(packed[1], inner.float()[None], ops)[0]
                outer = outer if down is None else outer + down
                want[token] += outer if options.get("scale_input") else outer * factor
            # What stands between two codes may be rounded to either.
            allowed = 1e-5 if ops.rounds(packed[1]) else TOLERANCE[dtype]
            assert got.dtype == x.dtype and nmse(got.float().numpy(), want.numpy()) <= allowed


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_quantized_latent_attention(dtype: str, name: str) -> None:
    heads, nope_dim, v_dim, rank = 3, 20, 12, 256 if name == "int4-g128" else 64
    tensor = quantized(heads * (nope_dim + v_dim), rank, SCHEMES[name], seed=0)
    weight = pack_stacked([tensor], num_stacked=heads, dtype=dtype, device="cpu")
    assert isinstance(weight, QuantizedWeight)
    exact = torch.from_numpy(to_float32(tensor)).double().view(heads, -1, rank)
    for num_tokens in (0, 1, 37):
        query = values(num_tokens, heads, nope_dim + 3, dtype=dtype)[..., 3:]
        check(OPS.absorb_keys(query, weight), OpTable.absorb_keys(query.double(), exact).to(query.dtype), dtype)
        latents = values(num_tokens, heads, rank, dtype=dtype, seed=1)
        want = OpTable.expand_values(latents.double(), exact, v_head_dim=v_dim).to(latents.dtype)
        check(OPS.expand_values(latents, weight, v_head_dim=v_dim), want, dtype)


FLOAT8 = {"e4m3fn": (torch.float8_e4m3fn, 448.0), "e4m3fnuz": (torch.float8_e4m3fnuz, 240.0)}


def rounded(x: torch.Tensor, kind: str) -> torch.Tensor:
    """float64: x rounded row by row to 8 bits, by torch's own conversions."""
    largest = x.float().abs().amax(-1, keepdim=True)
    if kind == "int8":
        scale = largest / 127
        return (x.float() * torch.where(scale > 0, 127 / largest, 0)).round().double() * scale.double()
    float8, top = FLOAT8[kind]
    scaled = x.float() * torch.where(largest > 0, top / largest, 0)
    return scaled.to(float8).double() * (largest / top).double()


@pytest.mark.parametrize("group", [16, 32, 128])
@pytest.mark.parametrize("kind", FLOAT8)
def test_products_in_float8_by_block(kind: str, group: int) -> None:
    """NVIDIA's matrix units take 32 columns of 8 bits: smaller blocks meet activations that are not rounded."""
    ops = TritonOps(replace(TINY, float8=kind), wide_dot=True)  # type: ignore[arg-type]
    tensor = quantized(37, 3 * group, replace(BLOCKS, group=group), seed=0)
    weight = pack_linear([tensor], dtype="float32", device="cpu", float8=kind)
    assert isinstance(weight, QuantizedWeight) and ops.rounds(weight) == (group > 16)
    assert weight.codes.nbytes + weight.scales.nbytes == packed_bytes((37, 3 * group), replace(BLOCKS, group=group))
    exact = torch.from_numpy(to_float32(tensor)).double()
    for num_tokens in (0, 1, 16, 40):
        x = values(num_tokens, 3 * group, seed=8)
        x[:, :group] *= 100  # a scale for the whole row would lose the rest
        check(ops.quantized_linear(x, weight), OpTable.linear(met_by(weight, x, ops), exact).float(), "float32")
    check(ops.embedding(torch.tensor([36, 0], dtype=torch.int32), weight), exact[[36, 0]].float(), "float32")


@pytest.mark.parametrize("kind", FLOAT8)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_in_float8(dtype: str, kind: str) -> None:
    ops = TritonOps(replace(TINY, float8=kind), wide_dot=True)  # type: ignore[arg-type]
    tensor = quantized(37, 70, FP8, seed=0)
    weight = pack_linear([tensor], dtype=dtype, device="cpu", float8=kind)
    assert isinstance(weight, QuantizedWeight) and ops.rounds(weight)
    exact = torch.from_numpy(to_float32(tensor)).double()
    held = weight.codes.view(FLOAT8[kind][0]).float() * weight.scales[0][:, None]
    assert torch.equal(held.double(), exact), "the bits mean what torch says"
    for num_tokens in (0, 1, 16, 17, 70):
        bias = values(37, seed=9) if num_tokens % 2 else None
        x = values(num_tokens, 70, dtype=dtype, seed=8)
        x[:1] = 0
        x[1:2] *= 1e-4
        want = OpTable.linear(*wide(rounded(x, kind), exact, bias)).to(x.dtype)
        check(ops.quantized_linear(x, weight, bias), want, dtype)
    check(ops.embedding(torch.tensor([36, 0], dtype=torch.int32), weight), exact[[36, 0]].to(DTYPES[dtype]), dtype)


def test_what_the_kernels_do_not_take_is_dense() -> None:
    dense = HostTensor(name="weight", dtype="float32", shape=(3, 32), data=values(3, 32).numpy())
    mixed = [quantized(3, 64, INT8, 0), quantized(2, 64, INT8_GROUPS, 1)], [quantized(3, 32, INT8, 0), dense]
    odd = [quantized(3, 36, Scheme(name="int8", group=12), 0)]
    for tensors in (*mixed, odd, [dense]):
        weight = pack_linear(tensors, dtype="float32", device="cpu")
        assert torch.equal(weight, torch.from_numpy(np.concatenate([to_float32(tensor) for tensor in tensors])))


# ---- attention ----------------------------------------------------------------------------------------------
RAGGED = ((1, 1), (8, 8), (1, 33), (0, 20), (5, 37), (3, 40), (1, 70))
DECODE = ((1, 1), (1, 32), (1, 33), (0, 5), (1, 100))


def attend(arguments: Sequence[Any], ops: TritonOps = OPS, **options: Any) -> torch.Tensor:
    """The kernels' attention of `paged`'s arguments."""
    query, cache, starts, lens, table = arguments
    return ops.paged_attention(query, cache, starts, lens, table, **options)


def paged(
    requests: Sequence[tuple[int, int]], *, heads: int, kv_heads: int, head_dim: int, dtype: str, window: int = 0
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of paged_attention over poisoned blocks of 8, padded tables, stale entries before the window."""
    rng, size = np.random.default_rng(0), 8
    counts, lens = np.array([c for c, _ in requests]), np.array([n for _, n in requests])
    needed = -(-lens // size)
    ids = rng.permutation(np.arange(1, needed.sum() + 3))
    blocks = len(ids) + 1
    cache = [torch.full((blocks, size, kv_heads, head_dim), torch.nan, dtype=DTYPES[dtype]) for _ in range(2)]
    table = np.full((len(requests), needed.max() + 2), -1)
    for row, (count, seq_len) in enumerate(requests):
        own, ids = ids[: needed[row]], ids[needed[row] :]
        table[row, : len(own)] = own
        for part, array in enumerate(cache):
            flat = array.view(-1, kv_heads, head_dim)
            for position in range(seq_len):
                slot = own[position // size] * size + position % size
                flat[slot] = values(kv_heads, head_dim, dtype=dtype, seed=1000 * row + 2 * position + part)
        if window:
            table[row, : max(0, seq_len - count - window + 1) // size] = blocks - 1
    query = values(int(counts.sum()), heads, head_dim, dtype=dtype, seed=7)
    starts = torch.from_numpy(np.cumsum([0, *counts]).astype(np.int32))
    lens32, table32 = (torch.from_numpy(array.astype(np.int32)) for array in (lens, table))
    return [query, tuple(cache), starts, lens32, table32], {
        "max_query_len": int(counts.max()),
        "max_seq_len": int(lens.max()),
    }


def as_integers(x: torch.Tensor) -> Integers:
    """The definition's cache of integers that holds what x does; NaN where x has none."""
    part = Integers(codes=torch.zeros(x.shape, dtype=torch.int8), scales=torch.zeros(x.shape[:-1]))
    slots = torch.arange(x.shape[0] * x.shape[1])
    part.write((slots // x.shape[1], slots % x.shape[1]), x.flatten(0, 1))
    return part


def sight(requests: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Where the sight of each token ends; a third of them see no further than themselves."""
    rng = np.random.default_rng(3)
    ends = [rng.integers(0, seq_len + 1, count) * (rng.random(count) < 0.67) for count, seq_len in requests]
    return torch.from_numpy(np.concatenate(ends).astype(np.int32))


CASES: list[dict[str, Any]] = [
    {},
    {"heads": 6, "kv_heads": 1},
    {"heads": 3, "kv_heads": 3, "head_dim": 20},
    {"heads": 9, "kv_heads": 3, "dtype": "float16"},
    {"dtype": "bfloat16"},
    {"window": 9},
    {"window": 8, "softcap": 3.0, "dtype": "float16"},
    {"softcap": 5.0},
    {"chunk": 9},
    {"chunk": 7, "reach": True, "heads": 9, "kv_heads": 3, "dtype": "float16"},
    {"sinks": True},
    {"alibi": True, "sinks": True},
    {"reach": True, "heads": 9, "kv_heads": 3},
    {"reach": True, "window": 9, "alibi": True, "dtype": "float16"},
    {"int8": True, "heads": 6, "kv_heads": 2, "head_dim": 20},
    {"heads": 20, "kv_heads": 1, "head_dim": 576},
    {"heads": 17, "kv_heads": 1, "head_dim": 272, "dtype": "bfloat16", "window": 9},
    {"int8": True, "heads": 6, "kv_heads": 2, "head_dim": 320, "dtype": "float16"},
    {"heads": 2, "kv_heads": 2, "head_dim": 512, "sinks": True},
    {"int8": True, "window": 9, "reach": True, "dtype": "bfloat16"},
    # As where registers are few: values ahead of keys, and wide heads piece by piece.
    {"piece": 32},
    {"piece": 32, "int8": True, "window": 9},
    {"piece": 32, "heads": 20, "kv_heads": 1, "head_dim": 576},
    {"piece": 32, "heads": 17, "kv_heads": 1, "head_dim": 272, "dtype": "bfloat16", "window": 9},
    {"piece": 32, "int8": True, "heads": 6, "kv_heads": 2, "head_dim": 136},
    {"piece": 32, "int8": True, "heads": 6, "kv_heads": 2, "head_dim": 320, "dtype": "float16"},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(f"{k}_{v}" for k, v in case.items()) or "plain")
@pytest.mark.parametrize("requests", [RAGGED, DECODE], ids=["ragged", "decode"])
def test_attention(requests: Sequence[tuple[int, int]], case: dict[str, Any]) -> None:
    case = {"heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": "float32", "window": 0, **case}
    softcap, dtype, chunk = case.pop("softcap", 0.0), case["dtype"], case.pop("chunk", 0)
    ops = TritonOps(replace(TINY, dear_piece=case.pop("piece", 0)), wide_dot=True)
    sinks = values(case["heads"], seed=3) if case.pop("sinks", False) else None
    slopes = 0.5 ** torch.arange(1.0, case["heads"] + 1) if case.pop("alibi", False) else None
    is_int8, has_reach = case.pop("int8", False), case.pop("reach", False)
    args, bounds = paged(requests, **case)
    if is_int8:
        args[1] = tuple(as_integers(part) for part in args[1])
    options: dict[str, Any] = {
        "scale": 0.3,
        "window": case["window"],
        "chunk": chunk,
        "softcap": softcap,
        "sinks": sinks,
        "alibi_slopes": slopes,
        "reach": sight(requests) if has_reach else None,
    }
    LAUNCHES.clear()
    got = attend(args, ops, **options, **bounds)
    is_decode = requests is DECODE
    assert LAUNCHES == {"paged_attention": 1, **({"paged_attention.join": 1} if is_decode else {})}
    query, cache, starts, lens, table = args
    wide_cache = cache if is_int8 else tuple(part.double() for part in cache)
    want = OpTable.paged_attention(query.double(), wide_cache, starts, lens, table, **options)
    check(got, want.to(query.dtype), dtype)


def test_a_split_does_not_depend_on_the_batch() -> None:
    args, bounds = paged(DECODE, heads=4, kv_heads=2, head_dim=16, dtype="float32")
    query, cache, starts, lens, table = args
    together = attend(args, scale=0.3, **bounds)
    last = slice(len(lens) - 1, None)
    one = torch.tensor([0, 1], dtype=torch.int32)
    alone = attend((query[-1:], cache, one, lens[last], table[last]), scale=0.3, **bounds)
    assert torch.equal(together[-1:], alone)


def test_no_tokens() -> None:
    args, _ = paged([(0, 5)], heads=4, kv_heads=2, head_dim=16, dtype="float32")
    assert attend(args, scale=0.3, max_query_len=0, max_seq_len=5).shape == (0, 4, 16)


def test_keys_and_values_land_in_their_slots() -> None:
    for dtype in DTYPES.values():
        cache = (torch.zeros(3, 4, 2, 40, dtype=dtype), torch.zeros(3, 4, 2, 40, dtype=dtype))
        qkv = values(5, 6, 40).to(dtype)
        slots = torch.tensor([11, -1, 4, 0, 7], dtype=torch.int32)
        OPS.write_kv(cache, qkv[:, 2:4], qkv[:, 4:], slots)
        for part, given in zip(cache, (qkv[:, 2:4], qkv[:, 4:]), strict=True):
            want = torch.zeros_like(part)
            for i, slot in enumerate(slots.tolist()):
                if slot >= 0:
                    want.view(12, 2, 40)[slot] = given[i]
            assert torch.equal(part, want)


# ---- sampling -----------------------------------------------------------------------------------------------
def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = values(4, 5000)
    logits[0, [17, 4500]] = 9.0
    logits[1, 4999] = 9.0
    logits[2, :] = float("-inf")
    logits[2, 4096] = -3.0
    assert OPS.pick_tokens(logits).tolist() == [17, 4999, 4096, int(logits[3].argmax())]
    assert OPS.pick_tokens(values(0, 7)).tolist() == []


def test_noise_is_that_of_the_definition() -> None:
    logits = values(6, 5001)
    seeds = torch.tensor([0, 1, -5, 2**31 - 1, 7, -(2**31)], dtype=torch.int32)
    positions = torch.tensor([0, 1, 77, 4096, 131071, 5], dtype=torch.int32)
    temperature = torch.tensor([1.0, 0.7, 1.5, 0.0, 1e-6, 10.0])
    got = OPS.pick_tokens(logits, seeds, positions, temperature)
    want = OpTable.sample(logits, seeds, positions, temperature, None, None, None)
    assert torch.equal(got, want)
    flat = torch.zeros(6, 5001)
    hot = torch.ones(6)
    chosen = OPS.pick_tokens(flat, seeds, positions, hot)
    assert torch.equal(chosen, gumbel_noise(seeds, positions, vocab_size=5001).argmax(-1).to(torch.int32))


# ---- places beyond 2^31 -------------------------------------------------------------------------------------
def far_rows(num_rows: int, n: int) -> torch.Tensor:
    """Rows of float16 that lie 2^30 + 64 numbers apart, so that the third lies beyond 2^31; memory that nobody writes
    takes none."""
    apart = (1 << 30) + 64
    rows = torch.empty((num_rows - 1) * apart + n, dtype=torch.float16).as_strided((num_rows, n), (apart, 1))
    return rows.copy_(values(num_rows, n))


def test_a_cache_may_have_more_than_2_31_numbers() -> None:
    """A pool of 4 GiB and more; of what is read and written here the blocks are the last ones."""
    num_blocks, heads, head_dim, size = (1 << 31) // (16 * 2 * 64) + 2, 2, 64, 16
    for is_int8 in (False, True):
        dtype = torch.int8 if is_int8 else torch.float16
        shape = (num_blocks, size, heads, head_dim)
        parts: list[Any] = [torch.empty(shape, dtype=dtype) for _ in range(2)]
        small: Any = OpTable.new_kv_cache(
            num_blocks=3, block_size=size, num_kv_heads=heads, head_dim=head_dim,
            dtype="int8" if is_int8 else "float16", device="cpu",
        )  # fmt: skip
        if is_int8:
            parts = [Integers(codes=codes, scales=torch.empty(shape[:3])) for codes in parts]
        key, value = (values(20, heads, head_dim, dtype="float16", seed=seed) for seed in (1, 2))
        slots = torch.arange(size, size + 20, dtype=torch.int32)
        OpTable.write_kv(small, key, value, slots)
        OPS.write_kv((parts[0], parts[1]), key, value, slots + (num_blocks - 3) * size)
        query = far_rows(3, 4 * head_dim).view(3, 4, head_dim)
        starts, lens = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
        table = torch.tensor([[1, 2]], dtype=torch.int32)
        how: dict[str, Any] = {"scale": 0.125, "max_query_len": 3, "max_seq_len": 20}
        got = OPS.paged_attention(query, (parts[0], parts[1]), starts, lens, table + num_blocks - 3, **how)
        check(got, OpTable.paged_attention(query.contiguous(), small, starts, lens, table, **how), "float16")


@pytest.mark.parametrize("name", ["int4", "fp8 by block"])
def test_a_weight_may_have_more_than_2_31_scales(name: str) -> None:
    """The first outputs of a weight whose groups have their scales 2^30 + 16 numbers apart."""
    ops, apart, outputs = TritonOps(replace(TINY, float8="e4m3fn"), wide_dot=True), (1 << 30) + 16, 16
    small = pack_linear([quantized(outputs, 128, SCHEMES[name], 0)], dtype="float32", device="cpu")
    x = values(16, 128)
    want = ops.quantized_linear(x, small)
    x, x_scales, options = ops._activations("linear", x, small, is_few=True)

    def spread(numbers: torch.Tensor | None) -> torch.Tensor | None:
        if numbers is None:
            return None
        far = torch.empty((len(numbers) - 1) * apart + outputs, dtype=numbers.dtype)
        return far.as_strided(numbers.shape, (apart, 1)).copy_(numbers)

    got = torch.zeros(outputs)
    options |= {"TOTAL": apart, "BIAS": False, "ROWS": 16, "COLS": outputs}
    arrays = (x, x_scales, small.codes, spread(small.scales), spread(small.offsets), None, got, 1, x.stride(0))
    kernel: Any = quantized_linear_kernel
    kernel[(1, 1)](*arrays, **options)
    check(got, want[0], "float32")


def test_rows_may_lie_far_apart() -> None:
    x, n = far_rows(3, 128), 128
    near, indices = x.contiguous(), torch.tensor([2, 0], dtype=torch.int32)
    check(OPS.gather(x, indices), near[indices.long()], "float16")
    check(OPS.act_mul(x, activation="silu"), OpTable.act_mul(near, activation="silu"), "float16")
    check(OPS.rms_norm(x, None, eps=1e-5), OpTable.rms_norm(near, None, eps=1e-5), "float16")
    cos, sin = values(3, 32), values(3, 32, seed=1)
    got, want = (ops.rope(part.view(3, 2, n // 2), cos, sin) for ops, part in ((OPS, x), (OpTable, near)))
    check(got, want, "float16")


# ---- tuning -------------------------------------------------------------------------------------------------
def test_every_architecture_has_a_tuning() -> None:
    nearest = {"sm_86": "sm_89", "sm_87": "sm_80", "sm_90a": "sm_90", "sm_103": "sm_100", "sm_120": "sm_89"}
    nearest |= {"gfx942:sramecc+:xnack-": "gfx942", "gfx1201": "gfx1100", "gfx908": "gfx90a", "unheard of": "xe"}
    assert {arch: tuning_for(arch).name for arch in nearest} == nearest
    assert all(name == tuning.name for name, tuning in TUNINGS.items())


def test_a_gpu_gets_the_float8_and_the_shared_memory_that_it_has() -> None:
    """AMD's ISA documents: CDNA3 (gfx942) has fnuz, CDNA4 (gfx950) OCP's; CUDA's table of compute capabilities:
    bytes of shared memory that a block may have."""
    assert [tuning_for(arch).float8 for arch in ("gfx90a", "gfx942", "gfx950")] == ["", "e4m3fnuz", "e4m3fn"]
    most = {
        "sm_80": 163,
        "sm_86": 99,
        "sm_87": 163,
        "sm_89": 99,
        "sm_90": 227,
        "sm_100": 227,
        "sm_120": 99,
    }
    assert {arch: tuning_for(arch).max_shared_bytes // 1024 for arch in most} == most


def test_keys_and_values_are_rounded_as_the_definition_rounds_them() -> None:
    for dtype in DTYPES.values():
        rows = values(6, 3, 40).to(dtype)
        rows[1, 1], rows[2, 0, 7], rows[3, 2, 0] = 0.0, torch.nan, -torch.inf
        slots = torch.tensor([11, -1, 4, 0, 7, 2], dtype=torch.int32)
        ours, theirs = (
            OpTable.new_kv_cache(num_blocks=3, block_size=4, num_kv_heads=3, head_dim=40, dtype="int8", device="cpu")
            for _ in range(2)
        )
        LAUNCHES.clear()
        OPS.write_kv(ours, rows, rows.flip(0), slots)
        assert LAUNCHES == {"write_kv": 1}
        kept = slots >= 0
        OpTable.write_kv(theirs, rows[kept], rows.flip(0)[kept], slots[kept])
        for part, want in zip(ours, theirs, strict=True):
            assert torch.equal(part.scales.isnan(), want.scales.isnan())
            whole = ~want.scales.isnan()
            assert torch.equal(part.scales[whole], want.scales[whole])
            assert torch.equal(part.codes[whole], want.codes[whole])
