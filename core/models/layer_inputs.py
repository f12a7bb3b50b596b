"""What layers read besides the residual stream, inside a forward function: of the tokens themselves (Gemma 4), and
rows of images."""

from ..stages import Array, EncoderBatch, ForwardBatch
from .memory import Caches
from .scope import Scope
from .spec import LayerSpec, ModelSpec


def layer_inputs(
    scope: Scope, spec: ModelSpec, batch: ForwardBatch | EncoderBatch, embeddings: Array
) -> tuple[Array, ...]:
    """[num_tokens, layer_input_size] for each layer, of the embeddings and of a table that all layers share; empty
    for a model without."""
    ops, size = scope.ops, spec.layer_input_size
    if not size:
        return ()
    of_all, hidden = size * spec.num_layers, spec.hidden_size
    table = scope.tokens("embed_layers", spec.vocab_size, of_all)
    looked_up = ops.scale(ops.embedding(batch.input_ids, table), size**0.5)
    x = ops.scale(scope.linear("embed_layers_proj", embeddings, of_all, hidden), hidden**-0.5)
    x = scope.normalize(spec.norm, "embed_layers_norm", ops.split_heads(x, head_dim=size), size)
    x = ops.scale(ops.add(ops.merge_heads(x), looked_up), 0.5**0.5)
    return ops.split(x, (size,) * spec.num_layers)


def read_input(at: Scope, spec: ModelSpec, layer: LayerSpec, own_input: Array, x: Array) -> Array:
    """What a layer reads of its input where x opens the gate: [num_tokens, hidden_size]."""
    size, hidden = spec.layer_input_size, spec.hidden_size
    gate_and_input = at.ops.concat((at.linear("input_gate", x, size, hidden), own_input))
    read = at.ops.act_mul(gate_and_input, activation=layer.mlp.activation)
    read = at.linear("input_proj", read, hidden, size)
    return at.normalize(spec.norm, "input_norm", read)


def place_images(scope: Scope, spec: ModelSpec, caches: Caches, part: int, x: Array) -> Array:
    """x: [num_tokens, hidden_size] with the rows of images: part 0 in the place of token embeddings, others added."""
    if spec.vision is None or spec.vision.is_crossed or caches.batch.image_rows is None:
        return x
    parts = scope.ops.split(caches.kv.images, (spec.hidden_size,) * spec.vision.num_row_parts)
    return scope.ops.place_rows(x, parts[part], caches.batch.image_rows, add=part > 0)
