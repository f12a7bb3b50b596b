"""Packed linear products and embedding rows against float64, and their bits across batch sizes and threads."""

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

gguf = pytest.importorskip("gguf")
ops = pytest.importorskip("headrace.kernels.cpu._ops", reason="the kernels are not built: pip install -e .")

Array = npt.NDArray[Any]
DENSE = ("float32", "bfloat16", "float16")
BLOCKS = {
    "q8_0": (32, 34),
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
}
"""Columns and bytes of a block in a GGUF file."""
HALVES = {"q4_1": (0, 2), "q5_1": (0, 2), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}
"""Where a block has numbers in float16; at its start if it is not here."""


def rng(*key: int) -> np.random.Generator:
    return np.random.default_rng(key)


def make(kit: Any, format: str, rows: int, cols: int, seed: int = 0) -> tuple[Any, Array]:
    """A packed weight and what it means, in float64."""
    random = rng(seed, rows, cols)
    if format in DENSE:
        weight = ops.PackedWeight(format, rows, cols)
        values = kit.to_dtype(random.standard_normal((rows, cols)), format)
        weight.write_dense(0, values)
        return weight, kit.to_float64(values)
    if format == "int8":
        weight = ops.PackedWeight(format, rows, cols)
        levels = random.integers(-127, 128, (rows, cols)).astype(np.int8)
        scales = random.uniform(0.001, 0.01, rows).astype(np.float32)
        weight.write_int8(0, levels, scales)
        return weight, levels * scales.astype(np.float64)[:, None]
    if format == "int4":
        group = 64
        groups = -(-cols // group)
        weight = ops.PackedWeight(format, rows, cols, group)
        quads = random.integers(0, 16, (rows, cols)).astype(np.uint8)
        scales = random.uniform(0.01, 0.1, (rows, groups)).astype(np.float32)
        offsets = random.uniform(-0.7, 0, (rows, groups)).astype(np.float32)
        weight.write_int4(0, quads, scales, offsets)
        wide = [np.repeat(a.astype(np.float64), group, 1)[:, :cols] for a in (scales, offsets)]
        return weight, quads * wide[0] + wide[1]
    weight = ops.PackedWeight(format, rows, cols)
    blocks, meaning = gguf_rows(random, format, rows, cols)
    weight.write_blocks(0, blocks)
    return weight, meaning


def gguf_rows(random: np.random.Generator, format: str, rows: int, cols: int) -> tuple[Array, Array]:
    """Random blocks as they stand in a GGUF file, and their values by the gguf package."""
    columns, num_bytes = BLOCKS[format]
    raw = random.integers(0, 256, (rows, cols // columns, num_bytes)).astype(np.uint8)
    for n, at in enumerate(HALVES.get(format, (0,))):
        low, high = (0.01, 0.1) if n == 0 else (0.05, 1.0)
        halves = random.uniform(low, high, raw.shape[:2])
        raw[..., at : at + 2] = halves.astype(np.float16)[..., None].view(np.uint8)
    raw = raw.reshape(rows, -1)
    meaning = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[format.upper()])
    return raw, meaning.astype(np.float64)


def fit(format: str, cols: int) -> int:
    """As many columns or a few more, so that blocks fill a row."""
    columns = BLOCKS.get(format, (1, 0))[0]
    return -(-cols // columns) * columns


def oracle(kit: Any, format: str, x: Array, meaning: Array, bias: Array | None) -> Array:
    """x @ weight.T + bias in float64; with int8, x is first rounded to 255 levels a row."""
    wide = kit.to_float64(x)
    if format == "int8":
        scale = np.abs(wide).max(-1, keepdims=True) / 127
        scale[scale == 0] = 1
        wide = np.round(wide / scale) * scale
    result: Array = wide @ meaning.T
    return result if bias is None else result + bias


FORMATS = (*DENSE, "int8", "int4", *BLOCKS)


@pytest.mark.parametrize("dtype", DENSE)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("num_tokens", "rows", "cols"), [(1, 48, 64), (1, 1, 32), (2, 17, 96), (7, 33, 160), (131, 50, 2080)]
)
def test_linear(kit: Any, tier: str, format: str, dtype: str, num_tokens: int, rows: int, cols: int) -> None:
    cols = fit(format, cols)
    weight, meaning = make(kit, format, rows, cols)
    x = kit.to_dtype(rng(1, num_tokens).standard_normal((num_tokens, cols)), dtype)
    bias = rng(2).standard_normal(rows).astype(np.float32)
    out = kit.Guarded((num_tokens, rows), dtype)
    ops.linear(out.array, x, weight, bias)
    # A level of x at the edge between two may round either way: not by more than bf16's bound.
    limit = max(kit.limits[dtype], 1e-5 if format == "int8" else 0)
    assert kit.nmse(out.check(), oracle(kit, format, x, meaning, bias)) < limit


@pytest.mark.parametrize("format", (*DENSE, "int8"))
@pytest.mark.parametrize("cols", [1, 2, 3, 5, 7, 13, 31, 577])
def test_odd_numbers_of_columns(kit: Any, tier: str, format: str, cols: int) -> None:
    weight, meaning = make(kit, format, 19, cols)
    for num_tokens, dtype in itertools.product((1, 3, 18), ("float32", "bfloat16")):
        x = kit.to_dtype(rng(3, cols).standard_normal((num_tokens, cols)), dtype)
        out = kit.Guarded((num_tokens, 19), dtype)
        ops.linear(out.array, x, weight)
        limit = max(kit.limits[dtype], 1e-5 if format == "int8" else 0)
        assert kit.nmse(out.check(), oracle(kit, format, x, meaning, None)) < limit


SIZES = (*range(1, 28), 36, 121, 127), (1, 3, 7, 29)
"""Numbers of tokens that are cut into tiles of every size."""


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("format", FORMATS)
def test_bits_do_not_depend_on_batch_or_threads(kit: Any, tier: str, format: str, dtype: str) -> None:
    cols = fit(format, 1088)
    weight, _ = make(kit, format, 75, cols)
    x = kit.to_dtype(rng(4).standard_normal((130, cols)), dtype)
    whole = kit.Guarded((130, 75), dtype).array
    ops.set_num_threads(1)
    ops.linear(whole, x, weight)
    for num_threads in (1, 2, 3):
        ops.set_num_threads(num_threads)
        for num_tokens in (*SIZES[num_threads > 1], 130):
            for start in {0, 130 - num_tokens}:
                part = kit.Guarded((num_tokens, 75), dtype).array
                ops.linear(part, x[start : start + num_tokens], weight)
                assert np.array_equal(part.view(np.uint8), whole[start : start + num_tokens].view(np.uint8))


QUANTIZED = ("int4", *BLOCKS)


@pytest.mark.parametrize("dtype", DENSE)
@pytest.mark.parametrize("format", QUANTIZED)
@pytest.mark.parametrize(("num_tokens", "rows", "cols"), [(1, 48, 64), (2, 17, 96), (7, 33, 160), (131, 50, 2080)])
def test_linear_of_quantized_x(
    kit: Any, tier: str, format: str, dtype: str, num_tokens: int, rows: int, cols: int
) -> None:
    cols = fit(format, cols)
    weight, meaning = make(kit, format, rows, cols)
    x = kit.to_dtype(rng(8, num_tokens).standard_normal((num_tokens, cols)), dtype)
    bias = rng(2).standard_normal(rows).astype(np.float32)
    out = kit.Guarded((num_tokens, rows), dtype)
    ops.linear(out.array, x, weight, bias, quantize_x=True)
    groups = kit.to_float64(x).reshape(num_tokens, cols // 32, 32)
    scale = np.abs(groups).max(-1, keepdims=True) / 127
    rounded = (np.round(groups / scale) * scale).reshape(num_tokens, cols)
    # A level of x at the edge between two may round either way.
    limit = max(kit.limits[dtype], 1e-6)
    assert kit.nmse(out.check(), rounded @ meaning.T + bias) < limit
    # And the rounding itself costs little.
    assert kit.nmse(out.array, kit.to_float64(x) @ meaning.T + bias) < limit + 1e-4


@pytest.mark.parametrize("byte", [0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("format", list(BLOCKS))
def test_sums_of_the_largest_integers_fit(kit: Any, tier: str, format: str, byte: int) -> None:
    """Of weights and of x, of one sign: a sum in 16 bits is as large as it can be."""
    columns, num_bytes = BLOCKS[format]
    raw = np.full((17, 512 // columns, num_bytes), byte, np.uint8)
    for at in HALVES.get(format, (0,)):
        raw[..., at : at + 2] = np.array([0.05], np.float16).view(np.uint8)
    blocks = raw.reshape(17, -1)
    weight = ops.PackedWeight(format, 17, 512)
    weight.write_blocks(0, blocks)
    meaning = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[format.upper()]).astype(np.float64)
    x = np.outer([1, -1, 1, -1, 1], np.ones(512)).astype(np.float32)
    for num_tokens in (1, 3, 5):
        out = kit.Guarded((num_tokens, 17), "float32")
        ops.linear(out.array, x[:num_tokens], weight, quantize_x=True)
        assert kit.nmse(out.check(), x[:num_tokens] @ meaning.T) < kit.limits["float32"]


@pytest.mark.parametrize("format", QUANTIZED)
def test_bits_with_quantized_x_do_not_depend_on_batch_or_threads(kit: Any, tier: str, format: str) -> None:
    cols = fit(format, 1088)
    weight, _ = make(kit, format, 75, cols)
    x = rng(9).standard_normal((130, cols)).astype(np.float32)
    x[3] = 0
    whole = kit.Guarded((130, 75), "float32").array
    ops.set_num_threads(1)
    ops.linear(whole, x, weight, quantize_x=True)
    assert not whole[3].any()
    for num_threads in (1, 3):
        ops.set_num_threads(num_threads)
        for num_tokens in (*SIZES[num_threads > 1], 130):
            for start in {0, 130 - num_tokens}:
                part = kit.Guarded((num_tokens, 75), "float32").array
                ops.linear(part, x[start : start + num_tokens], weight, quantize_x=True)
                assert np.array_equal(part, whole[start : start + num_tokens])


@pytest.mark.parametrize("format", FORMATS)
def test_embedding(kit: Any, format: str) -> None:
    cols = fit(format, 96)
    weight, meaning = make(kit, format, 50, cols)
    token_ids = np.array([49, 0, 17, 17, 31], np.int32)
    out = kit.Guarded((5, cols), "float32")
    ops.embedding(out.array, token_ids, weight)
    np.testing.assert_allclose(out.check(), meaning[token_ids], rtol=2e-7, atol=1e-7)


def test_write_dense_to_int8_rounds_to_nearest(kit: Any) -> None:
    values = rng(5).standard_normal((20, 100)).astype(np.float32)
    weight = ops.PackedWeight("int8", 20, 100)
    weight.write_dense(0, values)
    out = kit.Guarded((20, 100), "float32").array
    ops.embedding(out, np.arange(20, dtype=np.int32), weight)
    step = np.abs(values).max(-1, keepdims=True) / 127
    assert (np.abs(out - values) <= step * 0.5001).all()


@pytest.mark.parametrize("format", ("bfloat16", "q4_0"))
def test_rows_may_come_in_pieces(kit: Any, format: str) -> None:
    whole, meaning = make(kit, format, 45, 64)
    pieces = ops.PackedWeight(format, 45, 64)
    for start, end in ((0, 5), (30, 45), (5, 30)):
        if format == "q4_0":
            raw, _ = gguf_rows(rng(0, 45, 64), format, 45, 64)
            pieces.write_blocks(start, raw[start:end])
        else:
            pieces.write_dense(start, kit.to_dtype(meaning[start:end], format))
    x = rng(6).standard_normal((3, 64)).astype(np.float32)
    results = [kit.Guarded((3, 45), "float32").array for _ in range(2)]
    ops.linear(results[0], x, whole)
    ops.linear(results[1], x, pieces)
    assert np.array_equal(*results)


def test_a_row_that_is_not_finite_stays_alone(kit: Any, tier: str) -> None:
    weight, _ = make(kit, "float32", 20, 40)
    x = rng(7).standard_normal((3, 40)).astype(np.float32)
    expected = kit.Guarded((3, 20), "float32").array
    ops.linear(expected, x, weight)
    x[1, 3] = np.nan
    out = kit.Guarded((3, 20), "float32").array
    ops.linear(out, x, weight)
    assert np.isnan(out[1]).all()
    assert np.array_equal(out[[0, 2]], expected[[0, 2]])


def test_memory_is_what_was_announced() -> None:
    for format, rows, cols, group in (("bfloat16", 100, 64, 0), ("int8", 33, 100, 0), ("int4", 17, 256, 128)):
        assert ops.PackedWeight(format, rows, cols, group).num_bytes == ops.packed_bytes(format, rows, cols, group)


def test_errors(kit: Any) -> None:
    weight, _ = make(kit, "float32", 4, 8)
    x = np.zeros((2, 8), np.float32)
    out = np.zeros((2, 4), np.float32)
    with pytest.raises(ValueError, match=r"x must have shape \[any, 8\], got \[2, 7\]"):
        ops.linear(out, np.zeros((2, 7), np.float32), weight)
    with pytest.raises(ValueError, match=r"out must have shape \[2, 4\]"):
        ops.linear(np.zeros((2, 5), np.float32), x, weight)
    with pytest.raises(ValueError, match="same dtype"):
        ops.linear(np.zeros((2, 4), np.float16), x, weight)
    with pytest.raises(ValueError, match="bias must have shape"):
        ops.linear(out, x, weight, np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="must be float32, float16 or uint16"):
        ops.linear(out, x.astype(np.float64), weight)
    with pytest.raises(TypeError):
        ops.linear(out, np.asfortranarray(np.ones((2, 8), np.float32)), weight)
    with pytest.raises(ValueError, match="token id 4 at 1"):
        ops.embedding(np.zeros((2, 8), np.float32), np.array([0, 4], np.int32), weight)
    with pytest.raises(ValueError, match="unknown weight format 'int3'; known: float32"):
        ops.PackedWeight("int3", 4, 8)
    with pytest.raises(ValueError, match="32 columns, got 40"):
        ops.PackedWeight("q4_0", 4, 40)
    with pytest.raises(ValueError, match="256 columns, got 288"):
        ops.PackedWeight("q6_k", 4, 288)
    with pytest.raises(ValueError, match="group must be a multiple of 32"):
        ops.PackedWeight("int4", 4, 64, 48)
    with pytest.raises(ValueError, match="rows 3 to 5 are not all in a weight of 4 rows"):
        weight.write_dense(3, np.zeros((2, 8), np.float32))
    with pytest.raises(ValueError, match="quantize_x needs a weight of GGUF blocks"):
        ops.linear(out, x, weight, quantize_x=True)
    quantized = ops.PackedWeight("int8", 4, 8)
    bad = np.zeros((4, 8), np.float32)
    bad[2, 1] = np.nan
    with pytest.raises(ValueError, match="row 2 holds a NaN"):
        quantized.write_dense(0, bad)
    with pytest.raises(ValueError, match="at least one row"):
        ops.PackedWeight("float32", 0, 8)


@pytest.mark.parametrize("weight_dtype", ("float16", "float32"))
def test_denormals_of_float16_are_numbers(kit: Any, tier: str, weight_dtype: str) -> None:
    """Though those of float32 count as zero: they are normal numbers there."""
    small = np.arange(16 * 21).reshape(16, 21).astype(np.uint16).view(np.float16)
    weight = ops.PackedWeight(weight_dtype, 16, 21)
    weight.write_dense(0, small)
    for x in (np.eye(21, dtype=np.float32) * 1024, np.eye(21, dtype=np.float16)):
        out = kit.Guarded((21, 16), str(x.dtype))
        ops.linear(out.array, x, weight)
        assert np.array_equal(out.check(), small.T.astype(x.dtype) * x[0, 0])
