"""How a model is cut over a mesh of devices: the declared shards as JAX shardings. XLA puts in the collectives."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..errors import Unsupported
from ..models.params import Param
from ..models.spec import ModelSpec
from ..ops.jax._arrays import DTYPES
from ..ops.jax.attention import KV_HEADS_AXIS
from ..ops.jax.moe import expert_sums
from ..stages import Array

if TYPE_CHECKING:
    from ..models.spec import Activation

AXIS = "tp"
"""The mesh's one axis: tensor parallelism."""


def make_mesh(devices: Sequence[Any]) -> Mesh:
    """A mesh of these devices, one rank each."""
    return Mesh(np.array(devices), (AXIS,))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def kv_sharding(mesh: Mesh, num_kv_heads: int) -> NamedSharding:
    """A layer's KV cache, cut between its heads; a single one (latent attention has one) is whole on every device."""
    if num_kv_heads == 1:
        return replicated(mesh)
    return NamedSharding(mesh, PartitionSpec(*[None] * KV_HEADS_AXIS, AXIS))


def check_divides(spec: ModelSpec, tp_size: int) -> None:
    """Raise Unsupported if heads, feed-forward blocks or experts cannot be cut into `tp_size` equal parts."""
    for layer in spec.layers:
        for what, size in (
            ("attention heads", layer.attn.num_heads),
            ("KV heads", 0 if layer.attn.num_kv_heads == 1 else layer.attn.num_kv_heads),
            ("feed-forward columns", 0 if layer.moe is not None else layer.mlp.intermediate_size),
            ("experts", layer.moe.num_experts if layer.moe is not None else 0),
        ):
            if size % tp_size:
                fitting = [n for n in range(1, tp_size) if not size % n and not tp_size % n]
                raise Unsupported(
                    f"{size} {what} cannot be cut over {tp_size} devices",
                    remedies=[f"{fitting[-1]} devices" if fitting else "1 device"],
                )


def param_sharding(param: Param, mesh: Mesh) -> NamedSharding:
    """Where a parameter lies. One that cannot be cut evenly (an odd vocabulary) is whole on every device."""
    size = mesh.shape[AXIS]
    axis = {"column": 0, "vocab": 0, "expert": 0, "row": 1}.get(param.shard)
    rows = [part.rows for part in param.parts] or [param.shape[0]]
    if param.num_stacked > 1:
        rows = [param.num_stacked]
    if size == 1 or axis is None or any(n % size for n in (rows if axis == 0 else [param.shape[axis]])):
        return replicated(mesh)
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, AXIS))


def is_cut_by_parts(param: Param, mesh: Mesh) -> bool:
    """True if the parts of a fused parameter are arrays of their own, so that each device has its share of each.

    Stacked matrices (experts, heads) are cut between them and stay one array.
    """
    is_fused = len(param.parts) > 1 and param.num_stacked == 1
    return is_fused and not param_sharding(param, mesh).is_fully_replicated


def sharded_experts(mesh: Mesh) -> Callable[..., Any]:
    """The op grouped_experts over experts that are cut over the mesh: each device computes its own, one all-reduce
    sums them. A compiler left alone would bring all experts to all devices."""

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
    ) -> Array:
        """See core/ops/moe.py."""

        def own(x: Array, weights: Array, experts: Array, gate_up: Array, *rest: Array) -> Array:
            options: dict[str, Any] = dict(activation=activation, clamp=clamp, alpha=alpha)
            options |= dict(scale_input=scale_input, gated=gated)
            first = jax.lax.axis_index(AXIS) * gate_up.shape[0]
            return jax.lax.psum(expert_sums(x, weights, experts, gate_up, *rest, **options, first=first), AXIS)

        cut, whole = PartitionSpec(AXIS), PartitionSpec()
        specs = (whole, whole, whole, cut, cut, cut, cut)
        summed = jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=whole, check_vma=False)
        result: Array = summed(x, weights, experts, gate_up, down, gate_up_bias, down_bias).astype(x.dtype)
        return result

    return grouped_experts


def abstract_params(params: Sequence[Param], dtype: str, mesh: Mesh) -> dict[str, Any]:
    """Shapes, dtypes and shardings of parameters packed by the ops of core/ops/jax; no memory is taken."""

    def struct(shape: tuple[int, ...], param: Param) -> Any:
        kind = dtype if param.kind in ("linear", "embedding", "stacked") else "float32"
        if param.kind == "stacked":
            shape = (param.num_stacked, shape[0] // param.num_stacked, *shape[1:])
        return jax.ShapeDtypeStruct(shape, DTYPES[kind], sharding=param_sharding(param, mesh))

    return {
        param.name: tuple(struct((part.rows, *param.shape[1:]), param) for part in param.parts)
        if is_cut_by_parts(param, mesh)
        else struct(param.shape, param)
        for param in params
    }
