"""Mixtures of experts in plain torch operations of static shapes, no value read on the host."""

from collections.abc import Callable

import torch


def grouped_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    *,
    glu: Callable[[torch.Tensor], torch.Tensor],
    scale_input: bool,
    partial: bool,
) -> torch.Tensor:
    """As the declaration in core/ops/moe.py says. glu: [num_rows, 2 * n] -> [num_rows, n].

    Few tokens gather the weights of their experts; for many, every expert computes all tokens, and what is not its
    own is dropped: num_experts / num_experts_per_token times the work, the price of shapes that depend on no value.
    """
    num_experts, count = gate_up.shape[0], experts.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    biases = [
        None if bias is None else bias.view(num_experts, 1, -1).to(x.dtype) for bias in (gate_up_bias, down_bias)
    ]
    if len(x) * count <= num_experts:
        chosen = experts.flatten().long().clamp(max=num_experts - 1)
        factors = weights.reshape(-1, 1, 1)
        rows = x.repeat_interleave(count, 0)[:, None]
        if scale_input:
            rows = (rows * factors).to(x.dtype)
        inner, outer = (None if bias is None else bias[chosen] for bias in biases)
        y = _product(glu(_product(rows, gate_up[chosen], inner)), down[chosen], outer).to(wide)
        if not scale_input:
            y = y * factors
        if partial:
            y = torch.where(experts.reshape(-1, 1, 1) < num_experts, y, 0)
        return y.view(len(x), count, down.shape[1]).sum(1).to(x.dtype)
    out = torch.zeros((len(x), down.shape[1]), dtype=wide, device=x.device)
    for expert in range(num_experts):
        mine = experts == expert
        factor = (weights * mine).sum(1, keepdim=True)
        rows = (x * factor).to(x.dtype) if scale_input else x
        inner, outer = (None if bias is None else bias[expert] for bias in biases)
        y = _product(glu(_product(rows, gate_up[expert], inner)), down[expert], outer).to(wide)
        out = out + torch.where(mine.any(1, keepdim=True), y if scale_input else y * factor, 0)
    return out.to(x.dtype)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = x @ weight.to(x.dtype).mT
    return y if bias is None else y + bias
