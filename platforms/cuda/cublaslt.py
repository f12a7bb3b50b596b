"""Products in 8 bits by cuBLASLt, through torch: integers (`_int_mm`), float8 with a scale a row (`_scaled_mm`)."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from headrace.kernels.triton.quantized import QuantizedWeight

if TYPE_CHECKING:
    from headrace.kernels.triton.ops import TritonOps

FEW_ROWS = 16
"""Up to so many rows a product waits for the weights alone; cuBLASLt's integers begin behind."""
MULTIPLE = 16
"""Rows and columns of a weight must be a multiple of it."""


class CublasLt:
    """`linear` over a QuantizedWeight. What the library does not take is `others`'."""

    def __init__(self, kernels: "TritonOps", others: Callable[..., Any], *, has_float8: bool) -> None:
        """has_float8: the GPU multiplies e4m3fn with e4m3fn."""
        self._kernels = kernels
        self._others = others
        self._has_float8 = has_float8

    def __call__(self, x: Any, weight: Any, bias: Any = None) -> Any:
        if not self._takes(x, weight):
            return self._others(x, weight, bias)
        codes, scales = self._kernels.round_rows("linear", x, weight)
        if weight.is_float:
            kind = torch.float8_e4m3fn
            y = torch._scaled_mm(
                codes.view(kind),
                weight.codes.view(kind).t(),
                scale_a=scales,
                scale_b=weight.scales,
                out_dtype=torch.bfloat16,
            )
            return y if bias is None else y + bias.to(y.dtype)
        y = torch._int_mm(codes, weight.codes.t()).float() * scales * weight.scales
        return (y if bias is None else y + bias).to(x.dtype)

    def _takes(self, x: Any, weight: Any) -> bool:
        if not isinstance(weight, QuantizedWeight) or weight.bits != 8 or weight.group or len(x) <= FEW_ROWS:
            return False
        if weight.is_float and not (self._has_float8 and x.dtype == torch.bfloat16):
            return False  # with a scale for each row the library gives bfloat16 alone
        return weight.in_features % MULTIPLE == 0 and weight.out_features % MULTIPLE == 0
