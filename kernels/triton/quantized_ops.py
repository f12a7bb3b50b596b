"""The ops over weights in 8 or 4 bits: products, rows, experts, the heads of latent attention."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from dataclasses import dataclass
from typing import Any

import torch
import triton

from .experts import Sorted
from .launch import Launcher
from .quantized import QuantizedWeight, quantized_linear_kernel, quantized_rows_kernel
from .quantized_stacks import quantized_experts_kernel, quantized_heads_kernel
from .rounded import round_rows_kernel

LEAST_DEPTH = 32
"""Columns of 8 bits that NVIDIA's matrix units multiply at a time; a scale for fewer has no product of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """Which rows a half of a mixture computes: pairs sorted by expert, in tiles of tile_rows rows, at most num_tiles;
    weights: float32 [num_tokens, per_token]."""

    sorted: Sorted
    weights: torch.Tensor
    tile_rows: int
    num_tiles: int


class QuantizedOps(Launcher):
    """The ops that read a QuantizedWeight."""

    def quantized_linear(
        self, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: [num_tokens, in_features]; see core/ops/packed.py. A weight with one scale an output, or one a block of
        float8, meets activations that are rounded to 8 bits too, where matrix units multiply those."""
        num_rows, is_few = len(x), len(x) <= 16
        out = torch.empty((num_rows, weight.out_features), dtype=x.dtype, device=x.device)
        part = 2 if x.dtype.itemsize > 2 else 1  # of a tile, whose sums of float32 would spill
        x, scales, options = self._activations("linear", x, weight, is_few=is_few)
        rows = 16 if is_few else min(self.tuning.linear_rows // part, triton.next_power_of_2(num_rows))
        cols = self.tuning.few_cols if is_few else self.tuning.linear_cols // part
        self.launch(
            "linear",
            quantized_linear_kernel,
            (triton.cdiv(num_rows, rows), triton.cdiv(weight.out_features, cols)),
            x,
            scales,
            weight.codes,
            weight.scales,
            weight.offsets,
            bias,
            out,
            num_rows,
            x.stride(0),
            **options,
            BIAS=bias is not None,
            ROWS=rows,
            COLS=cols,
            num_warps=self.tuning.linear_warps,
            num_stages=self.tuning.stages,
        )
        return out

    def quantized_rows(self, token_ids: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
        """Rows of a weight by int32 [num_tokens], in its dtype."""
        n = weight.in_features
        out = torch.empty((len(token_ids), n), dtype=weight.dtype, device=token_ids.device)
        block = min(self.tuning.row_values, triton.next_power_of_2(n))
        self.launch(
            "embedding",
            quantized_rows_kernel,
            (len(token_ids), triton.cdiv(n, block)),
            weight.codes,
            weight.scales,
            weight.offsets,
            token_ids,
            out,
            **weight.constants(),
            BLOCK=block,
            num_warps=self.warps(block),
        )
        return out

    def quantized_experts(
        self,
        op: str,
        x: torch.Tensor,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        routed: Routed,
        out: torch.Tensor,
        *,
        is_up: bool,
        is_scaled: bool,
        activation: str = "silu",
        clamp: float = 0.0,
        alpha: float = 1.702,
        gated: bool = True,
    ) -> torch.Tensor:
        """One half of a mixture into `out`: up reads x by token and writes sorted rows, down reads sorted rows and
        writes pairs."""
        is_few = routed.tile_rows <= 16
        x, scales, options = self._activations(op, x, weight, is_few=is_few, depth=self.tuning.expert_depth)
        cols = self.tuning.few_cols if is_few else self.tuning.expert_cols
        size, order = out.shape[1], routed.sorted
        self.launch(
            op,
            quantized_experts_kernel,
            (routed.num_tiles, triton.cdiv(size, cols)),
            x,
            scales,
            weight.codes,
            weight.scales,
            weight.offsets,
            bias,
            routed.weights,
            order.order,
            order.first,
            order.counts,
            order.ends,
            out,
            clamp,
            alpha,
            EXPERTS=weight.num_stacked,
            EXPERT_BLOCK=triton.next_power_of_2(weight.num_stacked),
            PER_TOKEN=routed.weights.shape[1],
            OUT=size,
            **options,
            UP=is_up,
            ACTIVATION=activation,
            GATED=gated,
            CLAMP=clamp > 0,
            BIAS=bias is not None,
            SCALE=is_scaled,
            ROWS=routed.tile_rows,
            COLS=cols,
            num_warps=self.tuning.few_warps if is_few else self.tuning.expert_warps,
            num_stages=self.tuning.stages,
        )
        return out

    def quantized_heads(
        self, op: str, x: torch.Tensor, weight: QuantizedWeight, *, first: int, size: int, absorb: bool
    ) -> torch.Tensor:
        """Each head of x, [num_tokens, num_heads, n], by its rows of the weight from `first` on; absorb: as they are,
        else transposed. Returns [num_tokens, num_heads, size]."""
        num_rows, num_heads, n = x.shape
        x = x if x.stride(-1) == 1 else x.contiguous()
        out = torch.empty((num_rows, num_heads, size), dtype=x.dtype, device=x.device)
        rows = 16 if num_rows <= 16 else min(self.tuning.expert_rows, triton.next_power_of_2(num_rows))
        self.launch(
            op,
            quantized_heads_kernel,
            (triton.cdiv(num_rows, rows), triton.cdiv(size, self.tuning.few_cols), num_heads),
            x,
            weight.codes,
            weight.scales,
            weight.offsets,
            out,
            num_rows,
            x.stride(0),
            x.stride(1),
            HEADS=num_heads,
            HEAD_ROWS=weight.out_features // weight.num_stacked,
            FIRST=first,
            ABSORB=absorb,
            OUT=size,
            **{**weight.constants(), "IN": n},
            ROWS=rows,
            COLS=self.tuning.few_cols,
            DEPTH=32,
            WIDE_DOT=self.wide_dot,
            num_warps=self.tuning.expert_warps,
            num_stages=self.tuning.stages,
        )
        return out

    def rounds(self, weight: QuantizedWeight) -> bool:
        """True if products with this weight round the activations."""
        if weight.bits != 8 or (weight.group and not weight.is_float):
            return False
        if 0 < weight.group < LEAST_DEPTH:
            return False
        return self.tuning.float8 == ("e4m3fnuz" if weight.is_fnuz else "e4m3fn") if weight.is_float else True

    def _activations(
        self, op: str, x: torch.Tensor, weight: QuantizedWeight, *, is_few: bool, depth: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, Any]]:
        """x as a product with the weight reads it, its scales if it is rounded, and the kernel's constants of both.
        depth: an upper bound, 0: none."""
        tuning, rounds = self.tuning, self.rounds(weight)
        scales = None
        if rounds:
            x, scales = self.round_rows(op, x, weight)
            most = tuning.few_depth if is_few else tuning.rounded_depth
            most = min(most, weight.group) if weight.group else most
        else:
            x = x if x.stride(-1) == 1 else x.contiguous()
            most = (tuning.few_depth if is_few else tuning.linear_depth) // (2 if x.dtype.itemsize > 2 else 1)
        if depth and not is_few:
            most = min(most, depth)
        return x, scales, {**weight.constants(), "ROUNDED": rounds, "DEPTH": most, "WIDE_DOT": self.wide_dot}

    def round_rows(self, op: str, x: torch.Tensor, weight: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
        """x, [num_rows, n], as codes of the weight's kind and float32 scales [num_rows, num_groups]."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        num_rows, n = x.shape
        group = weight.group or n
        codes = torch.empty((num_rows, n), dtype=weight.codes.dtype, device=x.device)
        scales = torch.empty((num_rows, n // group), dtype=torch.float32, device=x.device)
        block = triton.next_power_of_2(group)
        self.launch(
            f"{op}.round",
            round_rows_kernel,
            (num_rows, n // group),
            x,
            codes,
            scales,
            x.stride(0),
            IN=n,
            GROUP=group,
            BLOCK=block,
            FLOAT8=weight.is_float,
            FNUZ=weight.is_fnuz,
            num_warps=self.warps(block),
        )
        return codes, scales
