"""Products with weights in 8 or 4 bits.

A tile of codes becomes numbers in registers just before it is multiplied in the activations' own dtype (w8a16,
w4a16), or meets activations that are 8 bits too (w8a8, rounded.py). Sums are float32, of integers int32.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .rounded import float8_values, multiply_codes


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """A matrix [out_features, in_features] on the device, or several under each other: value = code * scale + offset.

    codes: int8 [out_features, in_features] of 8 bits, or uint8 with the bits of float8_e4m3fn (e4m3fnuz if is_fnuz),
    or uint8 [out_features, width] of 4: byte j of a row holds the
    code of column j in its low half and that of column width + j in its high half. width: half of the columns in
    whole groups, so that both halves of a run of bytes have one scale each; a last high half may be empty.
    scales, offsets: [num_groups, out_features] of groups of columns, float16 of integers and float32 of float8, or
    float32 [1, out_features] of whole rows. No offsets: 0 of 8 bits, -8 * scale of 4.
    dtype: of the rows that `embedding` gives.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    in_features: int
    group: int
    """columns that share a scale, a power of two; 0: all of a row"""
    bits: int
    dtype: torch.dtype
    is_fnuz: bool = False
    num_stacked: int = 1

    @property
    def is_float(self) -> bool:
        """True if the codes are float8."""
        return self.bits == 8 and self.codes.dtype == torch.uint8

    @property
    def out_features(self) -> int:
        """Rows of all matrices."""
        return len(self.codes)

    def constants(self) -> dict[str, int | bool]:
        """What the kernels are told of the layout when they are compiled."""
        return {
            "IN": self.in_features,
            "TOTAL": self.out_features,
            "WIDTH": self.codes.shape[1],
            "GROUP": self.group,
            "BITS": self.bits,
            "FLOAT8": self.is_float,
            "FNUZ": self.is_fnuz,
            "OFFSETS": self.offsets is not None,
        }


def row_width(in_features: int, bits: int, group: int) -> int:
    """Bytes of a row of codes."""
    return in_features if bits == 8 else -(-in_features // (2 * group)) * group


@triton.jit(do_not_specialize=["num_rows"])
def quantized_linear_kernel(
    x_ptr,
    x_scale_ptr,
    code_ptr,
    scale_ptr,
    offset_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    stride_row,
    IN: tl.constexpr,
    TOTAL: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    FLOAT8: tl.constexpr,
    FNUZ: tl.constexpr,
    OFFSETS: tl.constexpr,
    ROUNDED: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """out[i] = x[i] @ weight.T + bias. ROUNDED: x are codes, with scales of their own."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = (tl.program_id(1) * COLS + tl.arange(0, COLS)).to(tl.int64)
    is_row = row < num_rows
    is_col = col < TOTAL
    total = product(
        x_ptr + row * stride_row,
        x_scale_ptr,
        row,
        is_row,
        code_ptr,
        scale_ptr,
        offset_ptr,
        col,
        is_col,
        IN=IN,
        TOTAL=TOTAL,
        WIDTH=WIDTH,
        GROUP=GROUP,
        BITS=BITS,
        FLOAT8=FLOAT8,
        FNUZ=FNUZ,
        OFFSETS=OFFSETS,
        ROUNDED=ROUNDED,
        DEPTH=DEPTH,
        WIDE_DOT=WIDE_DOT,
    )
    if BIAS:
        total += tl.load(bias_ptr + col, mask=is_col, other=0.0)[None, :]
    place = row[:, None] * TOTAL + col[None, :]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_col[None, :])


@triton.jit
def product(
    x_row,
    x_scale_ptr,
    row,
    is_row,
    code_ptr,
    scale_ptr,
    offset_ptr,
    weight_row,
    is_col,
    IN: tl.constexpr,
    TOTAL: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    FLOAT8: tl.constexpr,
    FNUZ: tl.constexpr,
    OFFSETS: tl.constexpr,
    ROUNDED: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """x @ weight.T, float32 [rows, cols]. x_row: where each row of x begins; row: its number among the scales of
    rounded x; weight_row: rows of the weight, int64 [cols]. WIDTH: bytes of a row of codes. TOTAL: all rows.
    """
    rows: tl.constexpr = row.shape[0]
    cols: tl.constexpr = weight_row.shape[0]
    total = tl.zeros([rows, cols], tl.int32 if ROUNDED and not FLOAT8 else tl.float32)
    next_group = tl.full([], TOTAL, tl.int64)
    code_row = code_ptr + weight_row * WIDTH
    for start in range(0, WIDTH, DEPTH):
        k = start + tl.arange(0, DEPTH)
        is_k = k < WIDTH
        codes = tl.load(code_row[None, :] + k[:, None], mask=is_k[:, None] & is_col[None, :], other=0)
        if ROUNDED:
            x = tl.load(x_row[:, None] + k[None, :], mask=is_row[:, None] & is_k[None, :], other=0)
            if GROUP > 0:
                part = multiply_codes(x, codes, tl.zeros([rows, cols], tl.float32), FLOAT8, FNUZ, WIDE_DOT)
                group = start // GROUP
                part *= tl.load(x_scale_ptr + row * (IN // GROUP) + group, mask=is_row, other=0.0)[:, None]
                part *= tl.load(scale_ptr + group * next_group + weight_row, mask=is_col, other=0.0)[None, :]
                total += part
            else:
                total = multiply_codes(x, codes, total, FLOAT8, FNUZ, WIDE_DOT)
        elif BITS == 4:
            low = _numbers(
                codes & 15, start, scale_ptr, offset_ptr, weight_row, IN, TOTAL, GROUP, BITS, FLOAT8, FNUZ, OFFSETS
            )
            total = _multiply(total, x_row, k, is_k & (k < IN), is_row, low, WIDE_DOT)
            high = _numbers(
                codes >> 4,
                start + WIDTH,
                scale_ptr,
                offset_ptr,
                weight_row,
                IN,
                TOTAL,
                GROUP,
                BITS,
                FLOAT8,
                FNUZ,
                OFFSETS,
            )
            total = _multiply(total, x_row, k + WIDTH, is_k & (k + WIDTH < IN), is_row, high, WIDE_DOT)
        else:
            weight = _numbers(
                codes, start, scale_ptr, offset_ptr, weight_row, IN, TOTAL, GROUP, BITS, FLOAT8, FNUZ, OFFSETS
            )
            total = _multiply(total, x_row, k, k < IN, is_row, weight, WIDE_DOT)
    result = total.to(tl.float32)
    if GROUP == 0:
        if ROUNDED:
            result *= tl.load(x_scale_ptr + row, mask=is_row, other=0.0)[:, None]
        result *= tl.load(scale_ptr + weight_row, mask=is_col, other=0.0)[None, :]
    return result


@triton.jit
def _numbers(
    codes,
    start,
    scale_ptr,
    offset_ptr,
    weight_row,
    IN: tl.constexpr,
    TOTAL: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    FLOAT8: tl.constexpr,
    FNUZ: tl.constexpr,
    OFFSETS: tl.constexpr,
):
    """The values of codes [depth, cols] from column `start` on, float32; without their scale if all of a row share
    one, which the sum is multiplied by."""
    depth: tl.constexpr = codes.shape[0]
    cols: tl.constexpr = codes.shape[1]
    values = float8_values(codes, FNUZ) if FLOAT8 else codes.to(tl.float32)
    if BITS == 4 and not OFFSETS:
        values -= 8.0
    if GROUP > 0:
        run: tl.constexpr = GROUP if GROUP < depth else depth
        group = start // GROUP + tl.arange(0, depth // run)
        mask = (group < IN // GROUP)[:, None] & (weight_row < TOTAL)[None, :]
        place = group.to(tl.int64)[:, None] * TOTAL + weight_row[None, :]
        runs = tl.reshape(values, [depth // run, run, cols])
        runs *= tl.load(scale_ptr + place, mask=mask, other=0.0).to(tl.float32)[:, None, :]
        if OFFSETS:
            runs += tl.load(offset_ptr + place, mask=mask, other=0.0).to(tl.float32)[:, None, :]
        values = tl.reshape(runs, [depth, cols])
    return values


@triton.jit
def _multiply(total, x_row, k, is_k, is_row, weight, WIDE_DOT: tl.constexpr):
    """total + x[:, k] @ weight, whose rows are those columns; weight is rounded to x's dtype."""
    x = tl.load(x_row[:, None] + k[None, :], mask=is_row[:, None] & is_k[None, :], other=0.0)
    if WIDE_DOT:
        x = x.to(tl.float32)
    return tl.dot(x, weight.to(x.dtype), total, input_precision="ieee")


@triton.jit
def quantized_rows_kernel(
    code_ptr,
    scale_ptr,
    offset_ptr,
    index_ptr,
    out_ptr,
    IN: tl.constexpr,
    TOTAL: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    FLOAT8: tl.constexpr,
    FNUZ: tl.constexpr,
    OFFSETS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[i] = weight[index[i]]."""
    i = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < IN
    row = tl.load(index_ptr + i).to(tl.int64)
    values = elements(
        code_ptr, scale_ptr, offset_ptr, row, col, mask, TOTAL, WIDTH, GROUP, BITS, FLOAT8, FNUZ, OFFSETS
    )
    tl.store(out_ptr + i * IN + col, values.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def elements(
    code_ptr,
    scale_ptr,
    offset_ptr,
    row,
    col,
    mask,
    TOTAL: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    FLOAT8: tl.constexpr,
    FNUZ: tl.constexpr,
    OFFSETS: tl.constexpr,
):
    """weight[row, col], float32, each by itself; row: int64."""
    if BITS == 4:
        is_high = col >= WIDTH
        byte = tl.load(code_ptr + row * WIDTH + tl.where(is_high, col - WIDTH, col), mask=mask, other=0)
        codes = tl.where(is_high, byte >> 4, byte & 15)
    else:
        codes = tl.load(code_ptr + row * WIDTH + col, mask=mask, other=0)
    values = float8_values(codes, FNUZ) if FLOAT8 else codes.to(tl.float32)
    if BITS == 4 and not OFFSETS:
        values -= 8.0
    if GROUP > 0:
        place = (col // GROUP).to(tl.int64) * TOTAL + row
        values *= tl.load(scale_ptr + place, mask=mask, other=0.0).to(tl.float32)
        if OFFSETS:
            values += tl.load(offset_ptr + place, mask=mask, other=0.0).to(tl.float32)
    else:
        values *= tl.load(scale_ptr + row + col * 0, mask=mask, other=0.0)
    return values
