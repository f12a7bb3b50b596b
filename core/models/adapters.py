"""Low-rank adapters inside a forward function: which of them each token runs through."""

from functools import partial

import numpy as np

from ..stages import ForwardBatch
from .scope import Adapters, Scope
from .spec import ModelSpec


def adapted(scope: Scope, spec: ModelSpec, batch: ForwardBatch) -> Scope:
    """The scope in which linear layers add what the batch's adapters do; the same if no token of it has any."""
    if spec.adapters is None or batch.adapters is None:
        return scope
    ops, count = scope.ops, spec.adapters.num_adapters + 1
    # One number for each token becomes a choice of one expert, by ops that every platform has.
    choices = scope.table("adapters", count, count, compute=partial(np.eye, count, dtype=np.float32))
    scores = ops.cast(ops.embedding(batch.adapters, choices), dtype="float32")
    weights, numbers = ops.route_experts(scores, num_experts_per_token=1)
    adapters = Adapters(spec=spec.adapters, ranks=dict(spec.adapters.ranks), weights=weights, numbers=numbers)
    return Scope(ops, scope.params, scope.hidden_size, scope.prefix, adapters)
