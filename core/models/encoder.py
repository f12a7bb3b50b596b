"""The forward function of encoders: every token sees all tokens of its request, and nothing is cached.

It walks the same spec as `decoder`, arrays touched through ops alone; nothing here looks at a value.
"""

from ..ops.table import OpTable
from ..stages import Array, EncoderBatch, ForwardBatch
from .constants import add_first
from .embeddings import embed_positions, embed_tokens
from .layers import walk
from .memory import WholeRequests
from .scope import Params, Scope
from .spec import ModelSpec


def encoder(
    ops: OpTable,
    spec: ModelSpec,
    params: Params,
    batch: ForwardBatch | EncoderBatch,
    prefix: str = "",
    embeddings: Array | None = None,
    behind_layers: dict[int, Array] | None = None,
    positions: Array | None = None,
) -> Array:
    """Hidden states after the last layer, [num_tokens, hidden_size]. `batch` holds whole requests.

    prefix: begins the names of its parameters, "encoder." of one that a decoder attends to. embeddings:
    [num_tokens, hidden_size], in place of those of token ids. behind_layers: takes the residual stream behind
    those that are its keys. positions: [num_tokens], in place of the batch's.
    """
    scope = Scope(ops, params, spec.hidden_size, prefix)
    x = _embed(scope, spec, batch, embeddings, batch.positions if positions is None else positions)
    return walk(scope, spec, x, WholeRequests(batch=batch), behind_layers)


def _embed(
    scope: Scope, spec: ModelSpec, batch: ForwardBatch | EncoderBatch, x: Array | None, positions: Array
) -> Array:
    """The residual stream before the first layer, [num_tokens, hidden_size]."""
    ops, size = scope.ops, spec.embed_size or spec.hidden_size
    if x is None:
        owner = scope.root if spec.shares_embedding else scope
        x = ops.embedding(batch.input_ids, embed_tokens(owner, spec))
    x = scope.scaled(x, spec.embed_scale)
    if spec.num_token_types:
        assert batch.token_types is not None, "the runner gives token types to models that have them"
        x = ops.add(x, ops.embedding(batch.token_types, _token_types(scope, spec, size)))
    if spec.num_learned_positions:
        x = ops.add(x, ops.embedding(positions, embed_positions(scope, spec, size)))
    if spec.embed_norm:
        x = scope.normalize(spec.norm, "embed_norm", x, size)
        if spec.layers[0].attn.has_padding:  # behind the patches of a tile: rows of zeros
            x = ops.mul(x, batch.is_patch)
    return scope.linear("embed_in", x, spec.hidden_size, size, bias=True) if spec.embed_size else x


def _token_types(scope: Scope, spec: ModelSpec, size: int) -> Array:
    """The embedding of token types, the task's included: [num_token_types, size]."""
    num_types, num_tasks = spec.num_token_types, spec.num_task_types
    if not num_tasks:
        return scope.table("embed_token_types", num_types, size)
    parts = {"embed_token_types.weight": num_types, "embed_task_types.weight": num_tasks}
    return scope.table("embed_types", num_types, size, parts=parts, combine=add_first)
