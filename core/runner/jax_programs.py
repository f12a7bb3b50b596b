"""The step as compiled programs: the functions of bucketed.py, traced once for each bucket.

Compiling needs shapes only, so that a step can also be compiled ahead of time for devices that are not here.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..models.declare import declare_params
from ..ops import OpTable
from ..ops.jax._arrays import DTYPES
from ..ops.jax.attention import KV_HEADS_AXIS
from ..platform import RunnerConfig
from ..stages import Array
from .bucketed import Programs
from .buckets import Bucket, Buckets, ForwardBucket, Grid, SampleBucket, size_of
from .caches import CacheArrays, image_row_size, new_caches
from .encode_buckets import EncodeBucket
from .jax_sharding import abstract_params, kv_sharding, replicated

_OP_BY_OP = Grid(num_reqs=4, num_tokens=2, smallest_reqs=1, few_reqs=True)
"""Where no step is compiled, sizes may be close together; what an interpreter spends on padding counts there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShapes:
    """What programs are compiled for: arrays, or shapes with shardings that stand for them."""

    params: Mapping[str, Any]
    """by canonical name"""
    kv: CacheArrays
    last_tokens: Any
    """[max_num_seqs] int32"""


def make_caches(config: RunnerConfig, ops: OpTable, mesh: Any, num_blocks: Sequence[int]) -> CacheArrays:
    """The zeroed caches of all layers: keys and values where a runner's ops put them, states on every device."""
    caches = new_caches(
        ops,
        config.groups,
        num_blocks,
        num_layers=config.spec.num_layers if config.groups else 0,
        block_size=config.block_size,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        device=None,
        state_device=replicated(mesh),
        num_image_rows=config.num_image_rows,
        image_row_size=image_row_size(config.spec),
    )
    return CacheArrays.of(caches)


def abstract_shapes(config: RunnerConfig, ops: OpTable, mesh: Any, num_blocks: Sequence[int]) -> StepShapes:
    """What `config` would be compiled for with parameters as core/ops/jax packs them; no memory is taken."""

    caches = jax.eval_shape(lambda: make_caches(config, ops, mesh, num_blocks))
    cut = {
        name: jax.tree.map(lambda part: _placed(part, kv_sharding(mesh, part.shape[KV_HEADS_AXIS])), parts)
        for name, parts in (("layers", caches.layers), ("cross", caches.cross))
    }
    whole = jax.tree.map(lambda part: _placed(part, replicated(mesh)), caches)
    kv = whole._replace(**cut)
    return StepShapes(
        params=abstract_params(declare_params(config.spec), config.dtype, mesh),
        kv=kv,
        last_tokens=jax.ShapeDtypeStruct((config.max_num_seqs,), jnp.int32, sharding=replicated(mesh)),
    )


class JaxPrograms:
    """Compiled steps of one model, by bucket. Invariant: a program takes and gives arrays of one sharding, and
    whoever calls it must not use the KV caches and last tokens that it took again."""

    def __init__(
        self,
        config: RunnerConfig,
        ops: OpTable,
        mesh: Any,
        shapes: StepShapes,
        compiler_options: Mapping[str, Any] | None = None,
        *,
        op_by_op: bool = False,
    ) -> None:
        """op_by_op: a step's ops are the programs; a step is none."""
        self._op_by_op = op_by_op
        self._compiler_options = dict(compiler_options or {})
        self.buckets = Buckets(config, _OP_BY_OP if op_by_op else Grid())
        self._programs = Programs(config, ops, self.buckets, _as_float)
        self._hidden_size = config.spec.hidden_size
        self._dtype = DTYPES[config.dtype]
        self._mesh = mesh
        self._params, self._kv, self._last_tokens = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            (dict(shapes.params), shapes.kv, shapes.last_tokens),
        )
        self._compiled: dict[Bucket, Any] = {}

    @property
    def num_programs(self) -> int | None:
        """Programs that have been compiled; None where steps run op by op."""
        return None if self._op_by_op else len(self._compiled)

    def program(self, bucket: Bucket) -> Any:
        """The program of a bucket; see Programs for what it takes and gives."""
        if self._op_by_op:
            return self._programs.function(bucket)
        if bucket not in self._compiled:
            self._compiled[bucket] = self.lower(bucket).compile(self._compiler_options)
        return self._compiled[bucket]

    def trace(self, bucket: Bucket) -> None:
        """Follow a bucket through its ops without compiling anything; whatever an op raises comes out."""
        jax.eval_shape(self._programs.function(bucket), *self._arguments(bucket))

    def lower(self, bucket: Bucket) -> Any:
        """The traced program of a bucket, to be compiled."""
        whole = replicated(self._mesh)
        options: dict[str, Any] = {"out_shardings": whole}
        if isinstance(bucket, ForwardBucket):
            options = {
                "donate_argnums": 1,
                "out_shardings": (whole, whole, jax.tree.map(lambda cache: cache.sharding, self._kv)),
            }
        elif isinstance(bucket, EncodeBucket):
            options = {"donate_argnums": 1, "out_shardings": jax.tree.map(lambda cache: cache.sharding, self._kv)}
        elif isinstance(bucket, SampleBucket):
            options["donate_argnums"] = 2
        return jax.jit(self._programs.function(bucket), **options).lower(*self._arguments(bucket))

    def _arguments(self, bucket: Bucket) -> tuple[Any, ...]:
        """The shapes of what the function of a bucket takes."""
        whole = replicated(self._mesh)
        packed = jax.ShapeDtypeStruct((size_of(self.buckets.layout(bucket)),), jnp.int32, sharding=whole)
        if isinstance(bucket, ForwardBucket):
            return self._params, self._kv, self._last_tokens, packed
        if isinstance(bucket, EncodeBucket):
            return self._params, self._kv, packed
        rows = bucket.num_samples if isinstance(bucket, SampleBucket) else bucket.num_tokens
        hidden = jax.ShapeDtypeStruct((rows, self._hidden_size), self._dtype, sharding=whole)
        if isinstance(bucket, SampleBucket):
            return self._params, hidden, self._last_tokens, packed
        return self._params, hidden, packed


def _placed(shape: Any, sharding: Any) -> Any:
    """An array that is not there, on its devices; None stays None."""
    return shape if shape is None else jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _as_float(words: Array) -> Array:
    return jax.lax.bitcast_convert_type(words, jnp.float32)
