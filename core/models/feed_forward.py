"""Feed-forward blocks of one layer inside a forward function: dense, and mixtures of experts."""

from ..stages import Array
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
    ops = at.ops
    up = at.linear("gate_up_proj" if mlp.gated else "up_proj", x, mlp.bias)
    if mlp.gate_scale != 1.0 or mlp.sparsity:
        gate, up = ops.split(up, (mlp.intermediate_size, mlp.intermediate_size))
        gate = _sparse(at, gate) if mlp.sparsity else ops.scale(gate, mlp.gate_scale)
        up = ops.concat((gate, up))
    if mlp.xielu:
        up = ops.xielu(up, at.param("act.alpha_p"), at.param("act.alpha_n"))
    else:
        up = ops.act_mul(up, activation=mlp.activation) if mlp.gated else ops.act(up, activation=mlp.activation)
    if mlp.inner_norm is not None:
        up = at.normalize(mlp.inner_norm, "inner_norm", up)
    return at.scaled(at.linear("down_proj", up, mlp.bias), mlp.out_scale)


def _sparse(at: Scope, x: Array) -> Array:
    """What of each row lies above the mean by so many deviations as `cut` says, below zero."""
    above = at.ops.act(at.ops.layer_norm(x, None, at.param("cut"), eps=NO_EPS), activation="relu")
    return at.ops.mul(above, at.ops.magnitude(x, centred=True))


def experts_of(at: Scope, moe: MoeSpec, x: Array, router_input: Array | None = None) -> Array:
    """A mixture of experts of x: [num_tokens, hidden_size]; returns that shape. router_input: what is routed by, if
    it is not x."""
    ops, router_input = at.ops, x if router_input is None else router_input
    logits = ops.cast(at.linear("router", router_input, moe.router_bias), dtype="float32")
    weights, experts = ops.route_experts(
        ops.softcap(logits, moe.router_softcap) if moe.router_softcap else logits,
        at.param("router.correction") if moe.has_correction else None,
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
    up = "experts.gate_up_proj" if moe.gated else "experts.up_proj"
    out = ops.grouped_experts(
        at.linear("latent_in", x) if moe.latent_size else x,
        weights,
        experts,
        at.param(f"{up}.weight"),
        at.param("experts.down_proj.weight"),
        at.param(f"{up}.bias") if moe.bias else None,
        at.param("experts.down_proj.bias") if moe.bias else None,
        activation=moe.activation,
        clamp=moe.clamp,
        scale_input=moe.scale_input,
        gated=moe.gated,
    )
    if moe.latent_size:
        out = at.linear("latent_out", out)
    if moe.num_identities:
        out = ops.add(out, ops.mul(x, share))
    if moe.shared is not None:
        shared = _mlp(at.inside("shared"), moe.shared, x)
        out = ops.add(out, ops.gate(shared, at.linear("shared_gate", x)) if moe.shared_gated else shared)
    return out if moe.out_norm is None else at.normalize(moe.out_norm, "out_norm", out)
