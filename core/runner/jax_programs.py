"""The step as compiled programs: the functions that every runner shares, traced once for each bucket.

Compiling needs shapes only, so that a step can also be compiled ahead of time for devices that are not here.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..models.declare import declare_params
from ..models.decoder import compute_logits, decoder
from ..models.spec import LayerSpec
from ..ops import OpTable
from ..platform import RunnerConfig
from ..stages import Array, ForwardBatch, KVCaches, SamplingBatch
from .jax_buckets import Buckets, ForwardBucket, Layout, PromptBucket, SampleBucket
from .jax_sharding import abstract_params, kv_sharding, replicated
from .step import prompt_logprobs, sample_and_remember

Bucket = ForwardBucket | SampleBucket | PromptBucket


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShapes:
    """What programs are compiled for: arrays, or shapes with shardings that stand for them."""

    params: Mapping[str, Any]
    """by canonical name"""
    kv: Sequence[Any]
    """the cache of each layer"""
    group_of_layer: tuple[int, ...]
    last_tokens: Any
    """[max_num_seqs] int32"""


def group_of_layer(config: RunnerConfig) -> tuple[int, ...]:
    """The KV group of each layer."""
    groups = [0] * config.spec.num_layers
    for index, group in enumerate(config.groups):
        for layer in group.layer_indices:
            groups[layer] = index
    return tuple(groups)


def abstract_shapes(config: RunnerConfig, ops: OpTable, mesh: Any, num_blocks: Sequence[int]) -> StepShapes:
    """What `config` would be compiled for with parameters as core/ops/jax packs them; no memory is taken."""

    def cache(layer: LayerSpec, group: int) -> Any:
        make = functools.partial(
            ops.new_kv_cache,
            num_blocks=num_blocks[group],
            block_size=config.block_size,
            num_kv_heads=layer.attn.num_kv_heads,
            head_dim=layer.attn.head_dim,
            dtype=config.dtype,
            device=kv_sharding(mesh),
        )
        shape = jax.eval_shape(make)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=kv_sharding(mesh))

    groups = group_of_layer(config)
    return StepShapes(
        params=abstract_params(declare_params(config.spec), config.dtype, mesh),
        kv=[cache(layer, group) for layer, group in zip(config.spec.layers, groups, strict=True)],
        group_of_layer=groups,
        last_tokens=jax.ShapeDtypeStruct((config.max_num_seqs,), jnp.int32, sharding=replicated(mesh)),
    )


class Programs:
    """Compiled steps of one model, by bucket. Invariant: a program takes and gives arrays of one sharding, and the
    KV caches and last tokens that it takes are gone afterwards."""

    def __init__(
        self,
        config: RunnerConfig,
        ops: OpTable,
        mesh: Any,
        shapes: StepShapes,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._compiler_options = dict(compiler_options or {})
        self.buckets = Buckets(config)
        self._spec = config.spec
        self._num_groups = len(config.groups)
        self._ops = ops
        self._mesh = mesh
        self._group_of_layer = shapes.group_of_layer
        self._params, self._kv, self._last_tokens = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            (dict(shapes.params), list(shapes.kv), shapes.last_tokens),
        )
        self._compiled: dict[Bucket, Any] = {}

    @property
    def num_compiled(self) -> int:
        """Programs that have been compiled."""
        return len(self._compiled)

    def compile_all(self) -> None:
        """Compile every bucket."""
        buckets: list[Bucket] = [
            *self.buckets.all_forward(),
            *self.buckets.all_sample(),
            *self.buckets.all_prompt(),
        ]
        for bucket in buckets:
            self.program(bucket)

    def program(self, bucket: Bucket) -> Any:
        """The compiled program of a bucket.

        forward: (params, kv, last_tokens, packed) -> (hidden_states, picked, kv); sample: (params, picked,
        last_tokens, packed) -> (token_ids, logprobs or (), last_tokens); prompt: (params, hidden_states, packed) ->
        logprobs.
        """
        if bucket not in self._compiled:
            self._compiled[bucket] = self.lower(bucket).compile(self._compiler_options)
        return self._compiled[bucket]

    def trace(self, bucket: ForwardBucket) -> None:
        """Follow a forward pass through its ops without compiling anything; whatever an op raises comes out."""
        packed = self._packed(self.buckets.forward_layout(bucket))
        jax.eval_shape(self._forward(bucket), self._params, self._kv, self._last_tokens, packed)

    def lower(self, bucket: Bucket) -> Any:
        """The traced program of a bucket, to be compiled."""
        whole = replicated(self._mesh)
        hidden_size, dtype = self._spec.hidden_size, self._kv[0].dtype

        def hidden(rows: int) -> Any:
            return jax.ShapeDtypeStruct((rows, hidden_size), dtype, sharding=whole)

        if isinstance(bucket, ForwardBucket):
            kv_shardings = [cache.sharding for cache in self._kv]
            program = jax.jit(self._forward(bucket), donate_argnums=1, out_shardings=(whole, whole, kv_shardings))
            packed = self._packed(self.buckets.forward_layout(bucket))
            return program.lower(self._params, self._kv, self._last_tokens, packed)
        if isinstance(bucket, SampleBucket):
            program = jax.jit(self._sample(bucket), donate_argnums=2, out_shardings=whole)
            packed = self._packed(self.buckets.sample_layout(bucket))
            return program.lower(self._params, hidden(bucket.num_samples), self._last_tokens, packed)
        program = jax.jit(self._prompt(bucket), out_shardings=whole)
        packed = self._packed(self.buckets.prompt_layout(bucket))
        return program.lower(self._params, hidden(bucket.num_tokens), packed)

    def _packed(self, layout: Layout) -> Any:
        size = sum(int(np.prod(shape)) for shape, _, _ in layout.values())
        return jax.ShapeDtypeStruct((size,), jnp.int32, sharding=replicated(self._mesh))

    # ---- what is traced -----------------------------------------------------------------------------------
    def _forward(self, bucket: ForwardBucket) -> Any:
        ops, layout = self._ops, self.buckets.forward_layout(bucket)

        def forward(params: Any, kv: Any, last_tokens: Array, packed: Array) -> tuple[Array, Array, Any]:
            arrays = _unpack(layout, packed)
            batch = ForwardBatch(
                input_ids=ops.recall_tokens(arrays["input_ids"], last_tokens, arrays["token_slots"]),
                positions=arrays["positions"],
                query_start_loc=arrays["query_start_loc"],
                seq_lens=arrays["seq_lens"],
                block_tables=[arrays[f"block_tables.{group}"] for group in range(self._num_groups)],
                slot_mappings=[arrays[f"slot_mappings.{group}"] for group in range(self._num_groups)],
                logits_indices=arrays["logits_indices"],
                rope_rows=arrays.get("rope_rows"),
                max_query_len=1 if bucket.decode else 0,
            )
            caches = KVCaches(layers=kv, group_of_layer=self._group_of_layer)
            hidden_states, caches = decoder(ops, self._spec, params, caches, batch)
            return hidden_states, ops.gather(hidden_states, batch.logits_indices), list(caches.layers)

        return forward

    def _sample(self, bucket: SampleBucket) -> Any:
        ops, layout = self._ops, self.buckets.sample_layout(bucket)

        def sample(params: Any, picked: Array, last_tokens: Array, packed: Array) -> tuple[Array, Any, Array]:
            batch = SamplingBatch(rows=None, num_logprobs=bucket.num_logprobs, **_unpack(layout, packed))
            logits = compute_logits(ops, self._spec, params, picked)
            sampled, last_tokens = sample_and_remember(ops, logits, last_tokens, batch)
            return sampled.token_ids, sampled.logprobs or (), last_tokens

        return sample

    def _prompt(self, bucket: PromptBucket) -> Any:
        ops, layout = self._ops, self.buckets.prompt_layout(bucket)

        def prompt(params: Any, hidden_states: Array, packed: Array) -> Any:
            arrays = _unpack(layout, packed)
            return prompt_logprobs(
                ops, self._spec, params, hidden_states, arrays["rows"], arrays["targets"], bucket.num_logprobs
            )

        return prompt


def _unpack(layout: Layout, packed: Array) -> dict[str, Array]:
    arrays, start = {}, 0
    for name, (shape, dtype, _) in layout.items():
        end = start + int(np.prod(shape))
        words = packed[start:end]
        arrays[name] = (jax.lax.bitcast_convert_type(words, dtype) if dtype != np.int32 else words).reshape(shape)
        start = end
    return arrays
