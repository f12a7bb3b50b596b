"""How a model is cut over a mesh of devices: the declared shards as JAX shardings. XLA puts in the collectives."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..errors import Unsupported
from ..models.params import Param
from ..models.spec import ModelSpec
from ..ops.jax._arrays import DTYPES
from ..ops.jax.attention import KV_HEADS_AXIS

AXIS = "tp"
"""The mesh's one axis: tensor parallelism."""


def make_mesh(devices: Sequence[Any]) -> Mesh:
    """A mesh of these devices, one rank each."""
    return Mesh(np.array(devices), (AXIS,))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def kv_sharding(mesh: Mesh) -> NamedSharding:
    """A layer's KV cache, cut between its heads."""
    return NamedSharding(mesh, PartitionSpec(*[None] * KV_HEADS_AXIS, AXIS))


def check_divides(spec: ModelSpec, tp_size: int) -> None:
    """Raise Unsupported if heads or feed-forward blocks cannot be cut into `tp_size` equal parts."""
    for layer in spec.layers:
        if tp_size > 1 and (layer.moe is not None or layer.attn.latent is not None):
            raise Unsupported(
                "experts and latent attention are not cut over several devices here", remedies=["1 device"]
            )
        for what, size in (
            ("attention heads", layer.attn.num_heads),
            ("KV heads", layer.attn.num_kv_heads),
            ("feed-forward columns", layer.mlp.intermediate_size),
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
    axis = {"column": 0, "vocab": 0, "row": 1}.get(param.shard)
    rows = [part.rows for part in param.parts] or [param.shape[0]]
    if size == 1 or axis is None or any(n % size for n in (rows if axis == 0 else [param.shape[axis]])):
        return replicated(mesh)
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, AXIS))


def is_cut_by_parts(param: Param, mesh: Mesh) -> bool:
    """True if the parts of a fused parameter are arrays of their own, so that each device has its share of each."""
    return len(param.parts) > 1 and not param_sharding(param, mesh).is_fully_replicated


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
