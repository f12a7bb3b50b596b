"""Stacked weights in JAX: experts as one ragged product, and the heads of latent attention."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from ...stages import Array
from ...weights.source import HostTensor
from ._arrays import compiled, precision, widen
from .elementwise import activate
from .packed import pack_linear

if TYPE_CHECKING:
    from ...models.spec import Activation, RouterScore


def pack_stacked(tensors: Sequence[HostTensor], *, num_stacked: int, dtype: str, device: Any) -> Array:
    """[num_stacked, out_features, in_features]. device: a JAX device or sharding."""
    weight: Array = pack_linear(tensors, dtype=dtype, device=device)
    return weight.reshape(num_stacked, weight.shape[0] // num_stacked, weight.shape[1])


@compiled(
    "num_experts_per_token",
    "score",
    "renormalize",
    "weight_scale",
    "num_groups",
    "num_groups_per_token",
    "group_score",
)
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
    """(weights float32, experts int32), both [num_tokens, num_experts_per_token]."""
    if score == "sparsemixer":
        return _sparsemixer(logits, num_experts_per_token)
    scores = jax.nn.softmax(logits, -1) if score == "softmax" else jax.nn.sigmoid(logits)
    choice = scores if correction is None else scores + correction
    if num_groups > 1:
        grouped = choice.reshape(*choice.shape[:-1], num_groups, choice.shape[-1] // num_groups)
        best = jax.lax.top_k(grouped, 2)[0].sum(-1) if group_score == "top2" else grouped.max(-1)
        chosen = jax.lax.top_k(best, num_groups_per_token)[1]
        kept = (chosen[..., None] == jnp.arange(num_groups)).any(-2)
        choice = jnp.where(kept[..., None], grouped, -jnp.inf).reshape(choice.shape)
    experts = jax.lax.top_k(choice, num_experts_per_token)[1]
    weights = jnp.take_along_axis(scores, experts, -1)
    if renormalize:
        weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-20)
    return weights * weight_scale, experts.astype(jnp.int32)


@compiled("num_experts")
def part_identities(weights: Array, experts: Array, *, num_experts: int) -> tuple[Array, Array, Array]:
    """(weights, experts, share float32 [num_tokens, 1]) without experts from num_experts on."""
    is_identity = experts >= num_experts
    share = jnp.where(is_identity, weights, 0.0).sum(-1, keepdims=True)
    return jnp.where(is_identity, 0.0, weights), jnp.where(is_identity, 0, experts), share


@compiled("activation", "clamp", "alpha", "scale_input", "gated", "partial")
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
    """Sum over a token's experts of weight * down(act(gate(x)) * up(x)), or ungated; rows are sorted by expert."""
    sums = expert_sums(
        x,
        weights,
        experts,
        gate_up,
        down,
        gate_up_bias,
        down_bias,
        activation=activation,
        clamp=clamp,
        alpha=alpha,
        scale_input=scale_input,
        gated=gated,
    )
    return sums.astype(x.dtype)


def expert_sums(
    x: Array,
    weights: Array,
    experts: Array,
    gate_up: Array,
    down: Array,
    gate_up_bias: Array | None,
    down_bias: Array | None,
    *,
    activation: "Activation",
    clamp: float,
    alpha: float,
    scale_input: bool,
    gated: bool,
    first: Any = 0,
) -> Array:
    """`grouped_experts` in float32 over some of the experts: those from `first` on whose weights are here."""
    num_experts, count = gate_up.shape[0], experts.shape[1]
    local = experts.reshape(-1) - first
    local = jnp.where((local >= 0) & (local < num_experts), local, num_experts)  # others come last
    order = jnp.argsort(local, stable=True)
    sorted_experts = local[order]
    rows, factors = x[order // count], weights.reshape(-1)[order][:, None]
    if scale_input:
        rows = (rows * factors).astype(x.dtype)
    sizes = jnp.bincount(local, length=num_experts + 1)[:num_experts].astype(jnp.int32)

    def product(rows: Array, weight: Array, bias: Array | None) -> Array:
        y = jax.lax.ragged_dot(rows, weight.astype(rows.dtype).swapaxes(1, 2), sizes, precision=precision(rows))
        if bias is None:
            return y
        return y + bias.reshape(num_experts, -1)[jnp.minimum(sorted_experts, num_experts - 1)].astype(y.dtype)

    inner = _inner(product(rows, gate_up, gate_up_bias), activation, clamp, alpha, gated)
    outputs = widen(product(inner, down, down_bias))
    if not scale_input:
        outputs = outputs * factors
    outputs = jnp.where(sorted_experts[:, None] < num_experts, outputs, 0)
    unsorted = jnp.zeros_like(outputs).at[order].set(outputs, unique_indices=True)
    return unsorted.reshape(x.shape[0], count, outputs.shape[1]).sum(1)


@compiled()
def absorb_keys(query: Array, weight: Array) -> Array:
    """[num_tokens, num_heads, qk_nope_head_dim] -> [num_tokens, num_heads, kv_lora_rank]."""
    keys = weight[:, : query.shape[-1]].astype(query.dtype)
    return jnp.einsum("thd,hdr->thr", query, keys, precision=precision(query))


@compiled("v_head_dim")
def expand_values(latents: Array, weight: Array, *, v_head_dim: int) -> Array:
    """[num_tokens, num_heads, kv_lora_rank] -> [num_tokens, num_heads, v_head_dim]."""
    values = weight[:, -v_head_dim:].astype(latents.dtype)
    return jnp.einsum("thr,hdr->thd", latents, values, precision=precision(latents))


def _inner(x: Array, activation: "Activation", clamp: float, alpha: float, gated: bool) -> Array:
    if not gated:
        return activate(widen(x), activation).astype(x.dtype)
    gate, up = jnp.split(widen(x), 2, -1)
    if clamp:
        gate, up = jnp.minimum(gate, clamp), jnp.clip(up, -clamp, clamp)
        return ((up + 1) * gate * jax.nn.sigmoid(alpha * gate)).astype(x.dtype)
    return (activate(gate, activation) * up).astype(x.dtype)


def _sparsemixer(logits: Array, num_experts_per_token: int) -> tuple[Array, Array]:
    weights, experts, left = [], [], logits
    for _ in range(num_experts_per_token):
        expert = left.argmax(-1, keepdims=True)
        top = jnp.take_along_axis(left, expert, -1)
        far = (top - logits) / jnp.maximum(jnp.abs(logits), top) > 2 * 0.01
        masked = jax.nn.softmax(jnp.where(far, -jnp.inf, left), -1)
        weights.append(jnp.take_along_axis(masked, expert, -1))
        experts.append(expert)
        left = jnp.where(jnp.arange(left.shape[-1]) == expert, -jnp.inf, left)
    return jnp.concatenate(weights, -1), jnp.concatenate(experts, -1).astype(jnp.int32)


FUNCTIONS = (pack_stacked, route_experts, part_identities, grouped_experts, absorb_keys, expand_values)
