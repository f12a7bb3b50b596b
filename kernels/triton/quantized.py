"""Products with weights in 8 or 4 bits: a tile of codes becomes numbers in registers, just before it is multiplied.

Memory holds 8 or 4 bits a weight, and the matrix units see the activations' own dtype (w8a16, w4a16); nothing of the
activations is rounded. Sums are float32.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .rounded import float8_values


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """A matrix [out_features, in_features] on the device: value = code * scale + offset.

    codes: int8 [out_features, in_features] of 8 bits, or uint8 with the bits of float8_e4m3fn (e4m3fnuz if is_fnuz),
    or uint8 [out_features, width] of 4: byte j of a row holds the
    code of column j in its low half and that of column width + j in its high half. width: half of the columns in
    whole groups, so that both halves of a run of bytes have one scale each; a last high half may be empty.
    scales, offsets: float16 [num_groups, out_features] of groups of columns, or float32 [1, out_features] of whole
    rows. No offsets: 0 of 8 bits, -8 * scale of 4.
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

    @property
    def is_float(self) -> bool:
        """True if the codes are float8."""
        return self.bits == 8 and self.codes.dtype == torch.uint8

    @property
    def out_features(self) -> int:
        """Rows of the matrix."""
        return len(self.codes)

    def constants(self) -> dict[str, int | bool]:
        """What the kernels are told of the layout when they are compiled."""
        return {
            "IN": self.in_features,
            "OUT": self.out_features,
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


@triton.jit
def quantized_linear_kernel(
    x_ptr,
    code_ptr,
    scale_ptr,
    offset_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    stride_row,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    FLOAT8: tl.constexpr,
    FNUZ: tl.constexpr,
    OFFSETS: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """out[i] = x[i] @ weight.T + bias; OFFSETS: there are offsets. WIDTH: bytes of a row of codes."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = (tl.program_id(1) * COLS + tl.arange(0, COLS)).to(tl.int64)
    is_row = row < num_rows
    is_col = col < OUT
    x_row = x_ptr + row[:, None] * stride_row
    code_row = code_ptr + col[None, :] * WIDTH
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, WIDTH, DEPTH):
        k = start + tl.arange(0, DEPTH)
        codes = tl.load(code_row + k[:, None], mask=(k < WIDTH)[:, None] & is_col[None, :], other=0)
        if BITS == 4:
            low = _numbers(codes & 15, start, scale_ptr, offset_ptr, col, IN, OUT, GROUP, BITS, FLOAT8, FNUZ, OFFSETS)
            total = _multiply(total, x_row, k, (k < WIDTH) & (k < IN), is_row, low, WIDE_DOT)
            high = _numbers(
                codes >> 4, start + WIDTH, scale_ptr, offset_ptr, col, IN, OUT, GROUP, BITS, FLOAT8, FNUZ, OFFSETS
            )
            total = _multiply(total, x_row, k + WIDTH, (k < WIDTH) & (k + WIDTH < IN), is_row, high, WIDE_DOT)
        else:
            weight = _numbers(codes, start, scale_ptr, offset_ptr, col, IN, OUT, GROUP, BITS, FLOAT8, FNUZ, OFFSETS)
            total = _multiply(total, x_row, k, k < IN, is_row, weight, WIDE_DOT)
    if GROUP == 0:
        total *= tl.load(scale_ptr + col, mask=is_col, other=0.0)[None, :]
    if BIAS:
        total += tl.load(bias_ptr + col, mask=is_col, other=0.0)[None, :]
    place = row[:, None] * OUT + col[None, :]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_col[None, :])


@triton.jit
def _numbers(
    codes,
    start,
    scale_ptr,
    offset_ptr,
    col,
    IN: tl.constexpr,
    OUT: tl.constexpr,
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
        mask = (group < IN // GROUP)[:, None] & (col < OUT)[None, :]
        place = group[:, None] * OUT + col[None, :]
        runs = tl.reshape(values, [depth // run, run, cols])
        runs *= tl.load(scale_ptr + place, mask=mask, other=0.0).to(tl.float32)[:, None, :]
        if OFFSETS:
            runs += tl.load(offset_ptr + place, mask=mask, other=0.0).to(tl.float32)[:, None, :]
        values = tl.reshape(runs, [depth, cols])
    return values


@triton.jit
def _multiply(total, x_row, k, is_k, is_row, weight, WIDE_DOT: tl.constexpr):
    """total + x[:, k] @ weight, whose rows are those columns; weight is rounded to x's dtype."""
    x = tl.load(x_row + k[None, :], mask=is_row[:, None] & is_k[None, :], other=0.0)
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
    OUT: tl.constexpr,
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
        place = (col // GROUP).to(tl.int64) * OUT + row
        values *= tl.load(scale_ptr + place, mask=mask, other=0.0).to(tl.float32)
        if OFFSETS:
            values += tl.load(offset_ptr + place, mask=mask, other=0.0).to(tl.float32)
    else:
        values *= tl.load(scale_ptr + row)
    tl.store(out_ptr + i * IN + col, values.to(out_ptr.dtype.element_ty), mask=mask)
