"""Feed-forward blocks of one layer inside a forward function: dense, and mixtures of experts."""

from ..ops.table import OpTable
from ..stages import Array
from .norms import NO_EPS, Params, normalize
from .spec import LayerSpec, MlpSpec, MoeSpec, NormSpec


def feed_forward(ops: OpTable, layer: LayerSpec, params: Params, prefix: str, x: Array) -> Array:
    """The layer's feed-forward block of x: [num_tokens, hidden_size]; returns that shape."""
    if layer.moe is not None and not layer.moe_ahead:
        return experts_of(ops, layer.moe, params, prefix, x)
    return _mlp(ops, layer.mlp, params, prefix, x)


def dense_and_experts(
    ops: OpTable,
    layer: LayerSpec,
    moe: MoeSpec,
    norm: NormSpec,
    params: Params,
    prefix: str,
    x: Array,
    residual: Array,
) -> Array:
    """A dense block of x beside experts of the residual, each [num_tokens, hidden_size] and with a norm behind it."""
    dense = _mlp(ops, layer.mlp, params, f"{prefix}mlp.", x)
    dense = normalize(ops, norm, params, f"{prefix}mlp_out_norm.", dense)
    routed = normalize(ops, norm, params, f"{prefix}moe.router_norm.", residual)
    experts = experts_of(
        ops,
        moe,
        params,
        f"{prefix}moe.",
        normalize(ops, norm, params, f"{prefix}moe_norm.", residual),
        ops.scale(routed, moe.router_scale),
    )
    return ops.add(dense, normalize(ops, norm, params, f"{prefix}moe_out_norm.", experts))


def _mlp(ops: OpTable, mlp: MlpSpec, params: Params, prefix: str, x: Array) -> Array:
    name = "gate_up_proj" if mlp.gated else "up_proj"
    bias = params[f"{prefix}{name}.bias"] if mlp.bias else None
    up = ops.linear(x, params[f"{prefix}{name}.weight"], bias)
    if mlp.gate_scale != 1.0 or mlp.sparsity:
        gate, up = ops.split(up, (mlp.intermediate_size, mlp.intermediate_size))
        gate = _sparse(ops, params[f"{prefix}cut"], gate) if mlp.sparsity else ops.scale(gate, mlp.gate_scale)
        up = ops.concat((gate, up))
    if mlp.xielu:
        up = ops.xielu(up, params[f"{prefix}act.alpha_p"], params[f"{prefix}act.alpha_n"])
    else:
        up = ops.act_mul(up, activation=mlp.activation) if mlp.gated else ops.act(up, activation=mlp.activation)
    if mlp.inner_norm is not None:
        up = normalize(ops, mlp.inner_norm, params, f"{prefix}inner_norm.", up)
    bias = params[f"{prefix}down_proj.bias"] if mlp.bias else None
    out = ops.linear(up, params[f"{prefix}down_proj.weight"], bias)
    return out if mlp.out_scale == 1.0 else ops.scale(out, mlp.out_scale)


def _sparse(ops: OpTable, cut: Array, x: Array) -> Array:
    """What of each row lies above the mean by so many deviations as `cut` says, below zero."""
    above = ops.act(ops.layer_norm(x, None, cut, eps=NO_EPS), activation="relu")
    return ops.mul(above, ops.magnitude(x, centred=True))


def experts_of(
    ops: OpTable, moe: MoeSpec, params: Params, prefix: str, x: Array, router_input: Array | None = None
) -> Array:
    """A mixture of experts of x: [num_tokens, hidden_size]; returns that shape. router_input: what is routed by, if
    it is not x."""
    router_input = x if router_input is None else router_input
    bias = params[f"{prefix}router.bias"] if moe.router_bias else None
    logits = ops.cast(ops.linear(router_input, params[f"{prefix}router.weight"], bias), dtype="float32")
    weights, experts = ops.route_experts(
        ops.softcap(logits, moe.router_softcap) if moe.router_softcap else logits,
        params[f"{prefix}router.correction"] if moe.has_correction else None,
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
    up = f"{prefix}experts.gate_up_proj" if moe.gated else f"{prefix}experts.up_proj"
    out = ops.grouped_experts(
        ops.linear(x, params[f"{prefix}latent_in.weight"]) if moe.latent_size else x,
        weights,
        experts,
        params[f"{up}.weight"],
        params[f"{prefix}experts.down_proj.weight"],
        params[f"{up}.bias"] if moe.bias else None,
        params[f"{prefix}experts.down_proj.bias"] if moe.bias else None,
        activation=moe.activation,
        clamp=moe.clamp,
        scale_input=moe.scale_input,
        gated=moe.gated,
    )
    if moe.latent_size:
        out = ops.linear(out, params[f"{prefix}latent_out.weight"])
    if moe.num_identities:
        out = ops.add(out, ops.mul(x, share))
    if moe.shared is not None:
        shared = _mlp(ops, moe.shared, params, f"{prefix}shared.", x)
        if moe.shared_gated:
            shared = ops.gate(shared, ops.linear(x, params[f"{prefix}shared_gate.weight"]))
        out = ops.add(out, shared)
    return out if moe.out_norm is None else normalize(ops, moe.out_norm, params, f"{prefix}out_norm.", out)
