"""Mixtures of experts: one grouped product over the rows of all experts, twice, without a wait for the host.

Rows (one token with one of its experts) are sorted by expert. A program owns a tile of rows of one expert, so that
tiles are padded at the end of each expert only; which expert a tile has is looked up on the device, and the grid is
the largest that any routing needs.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .elementwise import activate, sigmoid


@triton.jit
def glu_experts_kernel(
    x_ptr,
    up_ptr,
    bias_ptr,
    weight_ptr,
    order_ptr,
    first_ptr,
    count_ptr,
    end_ptr,
    out_ptr,
    clamp,
    alpha,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    CLAMP: tl.constexpr,
    BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """out[i] = act(gate(x[token])) * up(x[token]), or act(up(x[token])) unless GATED, for the sorted rows i.

    SCALE: x is multiplied by its weight.
    """
    expert, row, is_row = tile(first_ptr, count_ptr, end_ptr, EXPERTS=EXPERTS, EXPERT_BLOCK=EXPERT_BLOCK, ROWS=ROWS)
    if expert >= EXPERTS:
        return
    pair = tl.load(order_ptr + row, mask=is_row, other=0)
    token = (pair // PER_TOKEN).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    is_col = col < OUT
    gate = tl.zeros([ROWS, COLS], tl.float32)
    up = tl.zeros([ROWS, COLS], tl.float32)
    gate_row = expert.to(tl.int64) * (2 * OUT if GATED else OUT) + col
    up_row = gate_row + OUT if GATED else gate_row
    if SCALE:
        factor = tl.load(weight_ptr + pair, mask=is_row, other=0.0)
    for start in range(0, IN, DEPTH):
        k = start + tl.arange(0, DEPTH)
        is_k = k < IN
        x = tl.load(x_ptr + token[:, None] * IN + k[None, :], mask=is_row[:, None] & is_k[None, :], other=0.0)
        if SCALE:
            x = x.to(tl.float32) * factor[:, None]
            if not WIDE_DOT:
                x = x.to(x_ptr.dtype.element_ty)
        if WIDE_DOT:
            x = x.to(tl.float32)
        mask = is_k[:, None] & is_col[None, :]
        if GATED:
            w_gate = tl.load(up_ptr + gate_row[None, :] * IN + k[:, None], mask=mask, other=0.0).to(x.dtype)
            gate = tl.dot(x, w_gate, gate, input_precision="ieee")
        w_up = tl.load(up_ptr + up_row[None, :] * IN + k[:, None], mask=mask, other=0.0).to(x.dtype)
        up = tl.dot(x, w_up, up, input_precision="ieee")
    if BIAS:
        up += tl.load(bias_ptr + up_row, mask=is_col, other=0.0)[None, :]
        if GATED:
            gate += tl.load(bias_ptr + gate_row, mask=is_col, other=0.0)[None, :]
    if CLAMP:
        gate = tl.minimum(gate, clamp)
        up = tl.minimum(tl.maximum(up, -clamp), clamp)
        out = (up + 1.0) * gate * sigmoid(alpha * gate)
    elif GATED:
        out = activate(gate, ACTIVATION) * up
    else:
        out = activate(up, ACTIVATION)
    place = row.to(tl.int64)[:, None] * OUT + col[None, :]
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_col[None, :])


@triton.jit
def down_experts_kernel(
    inner_ptr,
    down_ptr,
    bias_ptr,
    weight_ptr,
    order_ptr,
    first_ptr,
    count_ptr,
    end_ptr,
    sum_ptr,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """sum[pair] = down(inner[i]) for the sorted rows i, float32; SCALE: times the pair's weight."""
    expert, row, is_row = tile(first_ptr, count_ptr, end_ptr, EXPERTS=EXPERTS, EXPERT_BLOCK=EXPERT_BLOCK, ROWS=ROWS)
    if expert >= EXPERTS:
        return
    pair = tl.load(order_ptr + row, mask=is_row, other=0).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    is_col = col < OUT
    total = tl.zeros([ROWS, COLS], tl.float32)
    w_row = expert.to(tl.int64) * OUT + col
    for start in range(0, IN, DEPTH):
        k = start + tl.arange(0, DEPTH)
        is_k = k < IN
        place = row.to(tl.int64)[:, None] * IN + k[None, :]
        x = tl.load(inner_ptr + place, mask=is_row[:, None] & is_k[None, :], other=0.0)
        w = tl.load(down_ptr + w_row[None, :] * IN + k[:, None], mask=is_k[:, None] & is_col[None, :], other=0.0)
        if WIDE_DOT:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        total = tl.dot(x, w, total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias_ptr + w_row, mask=is_col, other=0.0)[None, :]
    if SCALE:
        total *= tl.load(weight_ptr + pair, mask=is_row, other=0.0)[:, None]
    tl.store(sum_ptr + pair[:, None] * OUT + col[None, :], total, mask=is_row[:, None] & is_col[None, :])


@triton.jit
def tile(first_ptr, count_ptr, end_ptr, EXPERTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The expert of this program's tile, EXPERTS if it has none, its sorted rows, and which of them there are."""
    index = tl.arange(0, EXPERT_BLOCK)
    ends = tl.load(end_ptr + index, mask=index < EXPERTS, other=2147483647)
    place = tl.program_id(0) * ROWS
    expert = tl.sum((ends <= place).to(tl.int32), 0)
    known = tl.minimum(expert, EXPERTS - 1)
    count = tl.load(count_ptr + known)
    start = tl.load(end_ptr + known) - (count + ROWS - 1) // ROWS * ROWS
    local = place - start + tl.arange(0, ROWS)
    return expert, tl.load(first_ptr + known) + local, local < count


@dataclass(frozen=True, slots=True, kw_only=True)
class Sorted:
    """Rows sorted by expert; int32 on the device. order: [num_rows] the pairs token * per_token + j; by expert:
    first sorted row, number of rows, and where its tiles end, counted in padded rows."""

    order: torch.Tensor
    first: torch.Tensor
    counts: torch.Tensor
    ends: torch.Tensor


def sort_by_expert(experts: torch.Tensor, num_experts: int, tile_rows: int) -> Sorted:
    """experts: int32 [num_tokens, num_experts_per_token], num_experts for nobody's. The host reads nothing back."""
    chosen = experts.flatten().long()
    order = chosen.argsort(stable=True).to(torch.int32)
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=experts.device)
    counts.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int32))
    counts = counts[:num_experts]
    padded = (counts + tile_rows - 1) // tile_rows * tile_rows
    first, ends = counts.cumsum(0) - counts, padded.cumsum(0)
    return Sorted(order=order, first=first.to(torch.int32), counts=counts, ends=ends.to(torch.int32))


def most_tiles(num_rows: int, num_experts: int, tile_rows: int) -> int:
    """Tiles that any routing of so many rows fits into: whole ones, and one cut short for each expert."""
    return min(num_rows, num_rows // tile_rows + num_experts)
