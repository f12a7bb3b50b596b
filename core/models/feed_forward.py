"""Feed-forward blocks of one layer inside a forward function: dense, and mixtures of experts."""

from collections.abc import Mapping
from functools import partial
from statistics import NormalDist
from typing import Any

from ..stages import Array
from .constants import filled
from .scope import NO_EPS, Scope
from .spec import LayerSpec, MlpSpec, MoeSpec, NormSpec


def feed_forward(at: Scope, layer: LayerSpec, x: Array) -> Array:
    """The layer's feed-forward block of x: [num_tokens, hidden_size]; returns that shape."""
    if layer.moe is not None and not layer.moe_ahead:
        return experts_of(at, layer.moe, x)
    return _mlp(at, layer.mlp, x)


def dense_and_experts(
    layer: Scope, spec: LayerSpec, moe: MoeSpec, norm: NormSpec, x: Array, residual: Array
) -> Array:
    """A dense block of x beside experts of the residual, each [num_tokens, hidden_size] and with a norm behind it."""
    dense = layer.normalize(norm, "mlp_out_norm", _mlp(layer.inside("mlp"), spec.mlp, x))
    routed = layer.ops.scale(layer.normalize(norm, "moe.router_norm", residual), moe.router_scale)
    experts = experts_of(layer.inside("moe"), moe, layer.normalize(norm, "moe_norm", residual), routed)
    return layer.ops.add(dense, layer.normalize(norm, "moe_out_norm", experts))


def _mlp(at: Scope, mlp: MlpSpec, x: Array) -> Array:
    ops, hidden, size = at.ops, at.hidden_size, mlp.intermediate_size
    if mlp.gated:
        rows = {"gate_proj": size, "up_proj": size}
        up = at.fused("gate_up_proj", x, rows, hidden, mlp.bias, num_groups=size)
    else:
        up = at.linear("up_proj", x, size, hidden, "column", mlp.bias)
    if mlp.gate_scale != 1.0 or mlp.sparsity:
        gate, up = ops.split(up, (size, size))
        gate = _sparse(at, mlp, gate) if mlp.sparsity else ops.scale(gate, mlp.gate_scale)
        up = ops.concat((gate, up))
    if mlp.xielu:
        known = [alpha and partial(filled, (1,), alpha) for alpha in mlp.xielu_alphas or (None, None)]
        alphas = [at.param(f"act.alpha_{name}", 1, compute=n) for name, n in zip("pn", known, strict=True)]
        up = ops.xielu(up, alphas[0], alphas[1])
    else:
        up = ops.act_mul(up, activation=mlp.activation) if mlp.gated else ops.act(up, activation=mlp.activation)
    if mlp.inner_norm is not None:
        up = at.normalize(mlp.inner_norm, "inner_norm", up, size)
    return at.scaled(at.linear("down_proj", up, hidden, size, "row", mlp.bias), mlp.out_scale)


def _sparse(at: Scope, mlp: MlpSpec, x: Array) -> Array:
    """What of each row lies above the mean by so many deviations as `cut` says, below zero."""
    size = mlp.intermediate_size
    cut = at.constant("cut", size, compute=partial(filled, (size,), -NormalDist().inv_cdf(mlp.sparsity)))
    above = at.ops.act(at.ops.layer_norm(x, None, cut, eps=NO_EPS), activation="relu")
    return at.ops.mul(above, at.ops.magnitude(x, centred=True))


def experts_of(at: Scope, moe: MoeSpec, x: Array, router_input: Array | None = None) -> Array:
    """A mixture of experts of x: [num_tokens, hidden_size]; returns that shape. router_input: what is routed by, if
    it is not x."""
    ops, hidden, num_scores = at.ops, at.hidden_size, moe.num_experts + moe.num_identities
    size, expert_size = moe.intermediate_size, moe.latent_size or hidden
    router_input = x if router_input is None else router_input
    # A wrong expert is worse than a wrong digit, and these are small.
    logits = at.linear("router", router_input, num_scores, hidden, bias=moe.router_bias, quantizable=False)
    logits, correction = ops.cast(logits, dtype="float32"), None
    if moe.has_correction:
        zeros = partial(filled, (num_scores,), 0.0) if moe.may_lack_correction else None
        correction = at.param("router.correction", num_scores, compute=zeros)
    weights, experts = ops.route_experts(
        ops.softcap(logits, moe.router_softcap) if moe.router_softcap else logits,
        correction,
        num_experts_per_token=moe.num_experts_per_token,
        score=moe.score,
        renormalize=moe.renormalize,
        weight_scale=moe.weight_scale,
        num_groups=moe.num_groups,
        num_groups_per_token=moe.num_groups_per_token,
        group_score=moe.group_score,
    )
    if moe.num_identities:
        weights, experts, share = ops.part_identities(weights, experts, num_experts=moe.num_experts)
    pieces = ("gate_proj", "up_proj") if moe.gated else ("up_proj",)
    up, up_bias = _stacked(at, moe, "gate_up_proj" if moe.gated else "up_proj", pieces, size, expert_size)
    down, down_bias = _stacked(at, moe, "down_proj", ("down_proj",), expert_size, size)
    out = ops.grouped_experts(
        at.linear("latent_in", x, moe.latent_size, hidden) if moe.latent_size else x,
        weights,
        experts,
        up,
        down,
        up_bias,
        down_bias,
        activation=moe.activation,
        clamp=moe.clamp,
        alpha=moe.alpha,
        scale_input=moe.scale_input,
        gated=moe.gated,
    )
    if moe.latent_size:
        out = at.linear("latent_out", out, hidden, moe.latent_size)
    if moe.num_identities:
        out = ops.add(out, ops.mul(x, share))
    if moe.shared is not None:
        shared = _mlp(at.inside("shared"), moe.shared, x)
        if moe.shared_gated:
            shared = ops.gate(shared, at.linear("shared_gate", x, 1, hidden, quantizable=False))
        out = ops.add(out, shared)
    return out if moe.out_norm is None else at.normalize(moe.out_norm, "out_norm", out)


def _stacked(
    at: Scope, moe: MoeSpec, name: str, pieces: tuple[str, ...], rows: int, columns: int
) -> tuple[Array, Array | None]:
    """Weight of one projection of all experts, and its bias if there is one. pieces: of `rows` each, one after
    another for each expert."""
    num, out = moe.num_experts, moe.num_experts * len(pieces) * rows

    def parts(leaf: str) -> Mapping[str, int]:
        return {f"experts.{j}.{piece}.{leaf}": rows for j in range(num) for piece in pieces}

    both: dict[str, Any] = {"shard": "expert", "num_groups": rows, "num_stacked": num}
    weight = at.param(
        f"experts.{name}.weight",
        out,
        columns,
        kind="stacked",
        parts=lambda: parts("weight"),
        quantizable=True,
        **both,
    )
    return weight, at.param(f"experts.{name}.bias", out, parts=lambda: parts("bias"), **both) if moe.bias else None
