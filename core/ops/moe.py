"""Stacked weights: a mixture's experts and the heads of latent attention. One family: they share a packed layout."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from ..stages import Array
from ..weights.source import HostTensor
from .elementwise import activate

if TYPE_CHECKING:
    import torch

    from ..models.spec import Activation, RouterScore


def pack_stacked(tensors: Sequence[HostTensor], *, num_stacked: int, dtype: str, device: str) -> Array:
    """Put num_stacked matrices of one shape on the device in the provider's own layout; runs once, at load.

    tensors: stacked along the output rows as for `pack_linear`, [num_stacked * out_features, in_features] in all.
    Returns an opaque weight for `grouped_experts`, `absorb_keys` and `expand_values`; the definition holds
    [num_stacked, out_features, in_features].
    """
    from .packed import pack_linear

    weight: Array = pack_linear(tensors, dtype=dtype, device=device)
    return weight.unflatten(0, (num_stacked, -1))


def route_experts(
    logits: Array,
    correction: Array | None = None,
    *,
    num_experts_per_token: int,
    score: "RouterScore" = "softmax",
    renormalize: bool = True,
    weight_scale: float = 1.0,
    num_groups: int = 1,
    num_groups_per_token: int = 1,
    group_score: Literal["max", "top2"] = "top2",
) -> tuple[Array, Array]:
    """The experts of each token and their weights.

    logits: float32 [num_tokens, num_experts]; correction: float32 [num_experts], added to the scores for the
    choice only. The best experts are chosen from the best groups (DeepSeek-V3, 2.1.2); their weights are their
    scores, divided by their sum if renormalize, times weight_scale. sparsemixer: Liu et al. 2023, eq. 5 with a
    jitter of 0.01, and weights as they are. Returns (weights float32, experts int32), both [num_tokens,
    num_experts_per_token].
    """
    import torch

    if score == "sparsemixer":
        return _sparsemixer(logits, num_experts_per_token)
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    choice = scores if correction is None else scores + correction
    if num_groups > 1:
        grouped = choice.unflatten(-1, (num_groups, -1))
        best = grouped.topk(2, -1)[0].sum(-1) if group_score == "top2" else grouped.amax(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(-1, best.topk(num_groups_per_token, -1)[1], True)
        choice = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
    experts = choice.topk(num_experts_per_token, -1)[1]
    weights = scores.gather(-1, experts)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
    return weights * weight_scale, experts.to(torch.int32)


def part_identities(weights: Array, experts: Array, *, num_experts: int) -> tuple[Array, Array, Array]:
    """Takes experts that give back their input, those from num_experts on, out of what `route_experts` chose.

    Returns (weights, experts, share): expert 0 with weight 0 in the place of each of them, for `grouped_experts`, and
    the sum of their weights for each token, float32 [num_tokens, 1].
    """
    is_identity = experts >= num_experts
    share = (weights * is_identity).sum(-1, keepdim=True)
    return weights.masked_fill(is_identity, 0.0), experts.masked_fill(is_identity, 0), share


def grouped_experts(
    x: Array,
    weights: Array,
    experts: Array,
    gate_up: Array,
    down: Array,
    gate_up_bias: Array | None = None,
    down_bias: Array | None = None,
    *,
    activation: "Activation" = "silu",
    clamp: float = 0.0,
    alpha: float = 1.702,
    scale_input: bool = False,
    gated: bool = True,
    partial: bool = False,
) -> Array:
    """Sum over a token's experts of weight * down(act(gate(x)) * up(x)), or of weight * down(act(up(x))).

    x: [num_tokens, hidden_size]; weights: float32 and experts: int32 [num_tokens, num_experts_per_token] by
    `route_experts`; gate_up, down: packed by `pack_stacked`, [num_experts, 2 * n, hidden_size] with gate above
    up, and [num_experts, out_features, n]; biases: float32 [num_experts * 2 * n] and [num_experts * out_features].
    clamp: gate is cut at clamp, up to [-clamp, clamp], and the block is (up + 1) * gate * sigmoid(alpha * gate)
    (gpt-oss); 0 is activation. scale_input: weights multiply x instead (Llama 4). gated: False if gate_up holds up
    alone, [num_experts, n, hidden_size]. partial: experts may hold num_experts, for an expert of another rank or for
    none, which adds nothing. A token's experts are summed in the order in which they are listed, in float32 at
    least. Returns [num_tokens, out_features] in x's dtype.
    """
    import torch
    import torch.nn.functional as F

    num_experts, count = gate_up.shape[0], experts.shape[1]
    biases = [None if bias is None else bias.view(num_experts, -1).to(x.dtype) for bias in (gate_up_bias, down_bias)]
    chosen = experts.flatten().long()
    order = chosen.argsort(stable=True)
    rows, factors = x[order // count], weights.flatten()[order][:, None]
    if scale_input:
        rows = (rows * factors).to(x.dtype)
    wide, shape = torch.promote_types(x.dtype, torch.float32), (len(rows), down.shape[1])
    outputs = (torch.zeros if partial else torch.empty)(shape, dtype=wide, device=x.device)
    ends = torch.bincount(chosen, minlength=num_experts).cumsum(0)[:num_experts].tolist()
    start = 0
    for expert, end in enumerate(ends):
        if start < end:
            inner_bias, outer_bias = (None if bias is None else bias[expert] for bias in biases)
            inner = F.linear(rows[start:end], gate_up[expert].to(x.dtype), inner_bias)
            inner = glu(inner, activation, clamp, alpha, gated)
            outputs[start:end] = F.linear(inner, down[expert].to(x.dtype), outer_bias)
        start = end
    if not scale_input:
        outputs = outputs * factors
    unsorted = torch.empty_like(outputs)
    unsorted[order] = outputs
    return unsorted.view(len(x), count, down.shape[1]).sum(1).to(x.dtype)


def absorb_keys(query: Array, weight: Array) -> Array:
    """Queries taken into the space of latents, so that they meet latents instead of keys (DeepSeek-V2, 2.1).

    query: [num_tokens, num_heads, qk_nope_head_dim]; weight: packed by `pack_stacked`, [num_heads,
    qk_nope_head_dim + v_head_dim, kv_lora_rank], rows of keys first. Returns [num_tokens, num_heads, kv_lora_rank].
    """
    import torch

    keys = weight[:, : query.shape[-1]].to(query.dtype)
    return torch.einsum("thd,hdr->thr", query, keys)


def expand_values(latents: Array, weight: Array, *, v_head_dim: int) -> Array:
    """Each head's values of its mean latent: [num_tokens, num_heads, kv_lora_rank] -> [..., v_head_dim].

    weight: as for `absorb_keys`; the last v_head_dim rows of each head are those of values.
    """
    import torch

    return torch.einsum("thr,hdr->thd", latents, weight[:, -v_head_dim:].to(latents.dtype))


def glu(
    x: "torch.Tensor", activation: "Activation", clamp: float, alpha: float = 1.702, gated: bool = True
) -> "torch.Tensor":
    """The inside of an expert, [num_rows, 2 * n] or ungated [num_rows, n] -> [num_rows, n]; no op, but what experts
    share."""
    import torch

    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if not gated:
        return activate(wide, activation).to(x.dtype)
    gate, up = wide.chunk(2, -1)
    if clamp:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
        return ((up + 1) * gate * (alpha * gate).sigmoid()).to(x.dtype)
    return (activate(gate, activation) * up).to(x.dtype)


def _sparsemixer(logits: "torch.Tensor", num_experts_per_token: int) -> tuple[Array, Array]:
    import torch

    weights, experts, left = [], [], logits
    for _ in range(num_experts_per_token):
        top, expert = left.max(-1, keepdim=True)
        far = (top - logits) / logits.abs().maximum(top) > 2 * 0.01
        weights.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(-1, expert))
        experts.append(expert)
        left = left.scatter(-1, expert, float("-inf"))
    return torch.cat(weights, -1), torch.cat(experts, -1).to(torch.int32)
