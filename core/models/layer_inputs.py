"""What each layer reads of the tokens themselves (Gemma 4), inside a forward function."""

from ..ops.table import OpTable
from ..stages import Array, ForwardBatch
from .norms import Params, normalize
from .spec import LayerSpec, ModelSpec


def layer_inputs(
    ops: OpTable, spec: ModelSpec, params: Params, batch: ForwardBatch, embeddings: Array
) -> tuple[Array, ...]:
    """[num_tokens, layer_input_size] for each layer, of the embeddings and of a table that all layers share; empty
    for a model without."""
    size = spec.layer_input_size
    if not size:
        return ()
    looked_up = ops.scale(ops.embedding(batch.input_ids, params["embed_layers.weight"]), size**0.5)
    x = ops.scale(ops.linear(embeddings, params["embed_layers_proj.weight"]), spec.hidden_size**-0.5)
    x = normalize(ops, spec.norm, params, "embed_layers_norm.", ops.split_heads(x, head_dim=size))
    x = ops.scale(ops.add(ops.merge_heads(x), looked_up), 0.5**0.5)
    return ops.split(x, (size,) * spec.num_layers)


def finish_layer(
    ops: OpTable, spec: ModelSpec, layer: LayerSpec, params: Params, prefix: str, inputs: Array | None, x: Array
) -> Array:
    """The residual stream behind a layer that reads its input and scales its output: [num_tokens, hidden_size]."""
    if inputs is not None:
        x = ops.add(read_input(ops, spec, layer, params, prefix, inputs, x), x)
    return ops.mul(x, params[f"{prefix}scalar"])


def read_input(
    ops: OpTable, spec: ModelSpec, layer: LayerSpec, params: Params, prefix: str, inputs: Array, x: Array
) -> Array:
    """What a layer reads of its input where x opens the gate: [num_tokens, hidden_size]."""
    gate = ops.linear(x, params[f"{prefix}input_gate.weight"])
    read = ops.act_mul(ops.concat((gate, inputs)), activation=layer.mlp.activation)
    read = ops.linear(read, params[f"{prefix}input_proj.weight"])
    return normalize(ops, spec.norm, params, f"{prefix}input_norm.", read)
