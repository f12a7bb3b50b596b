"""Activations in 8 bits for products with 8-bit weights (w8a8): integers or float8, rounded just before.

One scale a row, or one for each run of a row's columns (blocks, DeepSeek-V3). Float8 comes in two forms: e4m3fn, and
AMD's e4m3fnuz, whose exponents are one lower and which has no minus zero.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl


@triton.jit
def round_rows_kernel(
    x_ptr,
    code_ptr,
    scale_ptr,
    stride_row,
    IN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    FLOAT8: tl.constexpr,
    FNUZ: tl.constexpr,
):
    """code[i] * scale[i] is x[i] rounded to int8, or to the bits of float8, nearest even. GROUP: columns a scale."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    place = tl.arange(0, BLOCK)
    mask = place < GROUP
    col = group * GROUP + place
    x = tl.load(x_ptr + row * stride_row + col, mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), 0)
    top: tl.constexpr = (240.0 if FNUZ else 448.0) if FLOAT8 else 127.0
    scaled = x * (top / tl.maximum(largest, 1e-30))
    if FLOAT8:
        codes = _float8_bits(scaled, FNUZ).to(tl.uint8)
    else:
        codes = round_half_even(scaled).to(tl.int8)
    tl.store(code_ptr + row * IN + col, codes, mask=mask)
    tl.store(scale_ptr + row * (IN // GROUP) + group, largest / top)


@triton.jit
def multiply_codes(x, weight, total, FLOAT8: tl.constexpr, FNUZ: tl.constexpr, WIDE_DOT: tl.constexpr):
    """total + x @ weight, both in 8 bits: int32 of integers, float32 of float8."""
    if FLOAT8 and WIDE_DOT:
        total = tl.dot(float8_values(x, FNUZ), float8_values(weight, FNUZ), total, input_precision="ieee")
    elif FLOAT8 and FNUZ:
        total = tl.dot(x.to(tl.float8e4b8, bitcast=True), weight.to(tl.float8e4b8, bitcast=True), total)
    elif FLOAT8:
        # Hopper's matrix units add products of float8 with some 14 bits: what a run of columns gives leaves them.
        run: tl.constexpr = x.shape[1] if x.shape[1] < 128 else 128
        left, right = x.to(tl.float8e4nv, bitcast=True), weight.to(tl.float8e4nv, bitcast=True)
        total = tl.dot(left, right, total, max_num_imprecise_acc=run)
    else:
        total = tl.dot(x, weight, total, out_dtype=tl.int32)
    return total


@triton.jit
def float8_values(bits, FNUZ: tl.constexpr):
    """What the bits of float8 stand for, float32, by whole-number arithmetic that every GPU has: the seven bits
    behind the sign are those of a float16 whose exponent is 8 (7 for fnuz) too low."""
    bits = bits.to(tl.uint16)
    half = ((bits & 128) << 8) | ((bits & 127) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * (128.0 if FNUZ else 256.0)


@triton.jit
def _float8_bits(x, FNUZ: tl.constexpr):
    """The bits of the float8 nearest to x, which is no larger than the largest; int32."""
    lowest: tl.constexpr = 0.0078125 if FNUZ else 0.015625  # below it, steps stay as they are there
    size = tl.abs(x)
    words = size.to(tl.int32, bitcast=True)
    words = (words + 0x7FFFF + ((words >> 20) & 1)) >> 20  # three bits of mantissa
    normal = words - ((119 if FNUZ else 120) << 3)
    small = round_half_even(size * (8.0 / lowest)).to(tl.int32)
    code = tl.where(size < lowest, small, normal)
    return tl.where((x < 0.0) & (code > 0), code | 128, code)


@triton.jit
def round_half_even(x):
    """The nearest whole number of one below 2^22, halves to even."""
    return (x + 12582912.0) - 12582912.0
