"""What several forward functions do with parameters, by spec: norms, dense layers, and biases by distance."""

from collections.abc import Mapping

from ..ops.table import OpTable
from ..stages import Array
from .spec import DenseSpec, ModelSpec, NormSpec

Params = Mapping[str, Array]
"""Parameters by canonical name, as `declare_params` lists them."""

NO_EPS = 1e-20
"""Of a norm without an epsilon: rows of zeros stay zeros."""


def normalize(ops: OpTable, norm: NormSpec, params: Params, prefix: str, x: Array) -> Array:
    """x: [..., n] over its last axis by the weights `{prefix}weight` and `{prefix}bias`; x's shape."""
    weight = params[f"{prefix}weight"] if norm.weight else None
    if norm.kind == "rms":
        return ops.rms_norm(x, weight, eps=norm.eps)
    bias = params[f"{prefix}bias"] if norm.bias else None
    return ops.layer_norm(x, weight, bias, eps=norm.eps)


def add_and_normalize(
    ops: OpTable,
    norm: NormSpec,
    params: Params,
    prefix: str,
    block: Array | None,
    residual: Array,
    has_norm: bool,
) -> tuple[Array, Array]:
    """Add a block's output to the residual and normalise the sum: (input of the next block, residual)."""
    if block is not None:
        if has_norm and norm.kind == "rms":
            weight = params[f"{prefix}weight"] if norm.weight else None
            return ops.add_rms_norm(block, residual, weight, eps=norm.eps)
        residual = ops.add(block, residual)
    return (normalize(ops, norm, params, prefix, residual) if has_norm else residual), residual


def dense(ops: OpTable, spec: DenseSpec, params: Params, x: Array, prefix: str = "") -> Array:
    """A linear layer with its activation and norm, as its spec says: [n, in_features] -> [n, out_features]."""
    name = f"{prefix}{spec.name}"
    layer = f"{name}.gate_up_proj" if spec.gated else name
    x = ops.linear(x, params[f"{layer}.weight"], params[f"{layer}.bias"] if spec.bias else None)
    if spec.norm is not None and spec.norm_first:
        x = normalize(ops, spec.norm, params, f"{name}_norm.", x)
    if spec.activation is not None:
        x = ops.act_mul(x, activation=spec.activation) if spec.gated else ops.act(x, activation=spec.activation)
    if spec.norm is not None and not spec.norm_first:
        x = normalize(ops, spec.norm, params, f"{name}_norm.", x)
    return x


def relative_bias(spec: ModelSpec, params: Params, prefix: str, layer_idx: int) -> Array | None:
    """A layer's bias of attention by distance, float32 [num_buckets, num_heads]; None if the model has none."""
    if not spec.num_relative_buckets:
        return None
    layer = f"layers.{layer_idx}.attn." if spec.relative_bias_by_layer else ""
    return params[f"{prefix}{layer}relative_bias.weight"]
