"""The forward function of decoder-only models: one walk over a spec, arrays touched through ops alone.

The same function runs eagerly, is captured, or is traced into a program; so nothing here looks at a value.
"""

from dataclasses import replace
from functools import partial

from ..ops.table import OpTable
from ..stages import Array, ForwardBatch, KVCaches
from .adapters import adapted
from .constants import filled
from .embeddings import embed_positions, embed_tokens
from .layer_inputs import place_images
from .layers import walk
from .memory import Caches, open_caches
from .scope import Params, Scope
from .spec import ModelSpec


def decoder(
    ops: OpTable, spec: ModelSpec, params: Params, kv: KVCaches, batch: ForwardBatch
) -> tuple[Array, KVCaches]:
    """Hidden states after the last norm, [num_tokens, hidden_size], and the caches with this step's keys and values.

    batch.input_ids holds token ids only (the runner has filled in what was unknown). Mutates the caches in `kv`.
    """
    scope, caches = adapted(Scope(ops, params, spec.hidden_size), spec, batch), open_caches(spec, kv, batch)
    hidden_states = walk(scope, spec, _embed(scope, spec, caches), caches)
    return hidden_states, replace(kv, layers=caches.layers, states=caches.states)


def compute_logits(ops: OpTable, spec: ModelSpec, params: Params, hidden_states: Array) -> Array:
    """Logits of gathered hidden states: [n, hidden_size] -> float32 [n, vocab_size]."""
    scope, size = Scope(ops, params, spec.hidden_size), spec.embed_size or spec.hidden_size
    if spec.embed_size:
        hidden_states = scope.linear("project_out", hidden_states, size, spec.hidden_size)
    if spec.head_transform is not None:
        hidden_states = scope.dense(spec.head_transform, hidden_states)
    if spec.tie_word_embeddings:
        weight = embed_tokens(scope, spec)
    else:
        weight = scope.tokens("lm_head", spec.vocab_size, size, unit_rows=spec.lm_head_unit_rows)
    bias = None
    if spec.lm_head_bias:
        none = partial(filled, (spec.vocab_size,), 0.0) if spec.kind == "encoder_decoder" else None
        bias = scope.param("lm_head.bias", spec.vocab_size, shard="vocab", compute=none)
    logits = ops.linear(hidden_states, weight, bias)
    logits = scope.scaled(ops.cast(logits, dtype="float32"), spec.logit_scale)
    return ops.softcap(logits, spec.logit_softcap) if spec.logit_softcap else logits


def _embed(scope: Scope, spec: ModelSpec, caches: Caches) -> Array:
    """The residual stream before the first layer, [num_tokens, hidden_size]."""
    ops, batch = scope.ops, caches.batch
    x = scope.scaled(ops.embedding(batch.input_ids, embed_tokens(scope, spec)), spec.embed_scale)
    if spec.embed_size:
        x = scope.linear("project_in", x, spec.hidden_size, spec.embed_size)
    x = place_images(scope, spec, caches, 0, x)
    if spec.positions_last:
        x = scope.normalize(spec.norm, "embed_norm", x)
    if spec.num_learned_positions:
        x = ops.add(x, ops.embedding(batch.positions, embed_positions(scope, spec, spec.hidden_size)))
    return scope.normalize(spec.norm, "embed_norm", x) if spec.embed_norm and not spec.positions_last else x
