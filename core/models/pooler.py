"""From hidden states to one vector a request: a mean of rows, then the dense layers of a head."""

from ..ops.table import OpTable
from ..stages import Array, PoolingBatch
from .scope import Params, Scope
from .spec import ModelSpec


def pool(ops: OpTable, spec: ModelSpec, params: Params, hidden_states: Array, batch: PoolingBatch) -> Array:
    """Vectors of requests, float32 [num_pooled, n]: logits of labels if the model has such a head.

    hidden_states: [num_tokens, hidden_size]. The first or last token of a request is the mean of one row.
    """
    x = ops.mean_rows(hidden_states, batch.starts, batch.ends)
    for layer in spec.pooler.dense if spec.pooler is not None else ():
        x = Scope(ops, params, spec.hidden_size).dense(layer, x)
    return ops.cast(x, dtype="float32")
