"""From hidden states to one vector a request: a mean of rows, then the dense layers of a head."""

from ..ops.table import OpTable
from ..stages import Array, PoolingBatch
from .norms import Params, normalize
from .spec import ModelSpec


def pool(ops: OpTable, spec: ModelSpec, params: Params, hidden_states: Array, batch: PoolingBatch) -> Array:
    """Vectors of requests, float32 [num_pooled, n]: logits of labels if the model has such a head.

    hidden_states: [num_tokens, hidden_size]. The first or last token of a request is the mean of one row.
    """
    x = ops.mean_rows(hidden_states, batch.starts, batch.ends)
    for dense in spec.pooler.dense if spec.pooler is not None else ():
        bias = params[f"{dense.name}.bias"] if dense.bias else None
        x = ops.linear(x, params[f"{dense.name}.weight"], bias)
        if dense.activation is not None:
            x = ops.act(x, activation=dense.activation)
        if dense.norm is not None:
            x = normalize(ops, dense.norm, params, f"{dense.name}_norm.", x)
    return ops.cast(x, dtype="float32")
