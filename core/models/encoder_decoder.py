"""The encoder's half of a step of models whose decoders attend to another input.

What the encoder makes of it is turned into keys and values of each decoder layer once, and kept in the blocks of the
Cross KV group. Arrays are touched through ops alone; nothing here looks at a value.
"""

from dataclasses import replace

from ..ops.table import OpTable
from ..stages import Array, EncoderBatch, KVCaches
from .attention import cross_keys
from .encoder import encoder
from .scope import Params, Scope
from .spec import ModelSpec


def encode(ops: OpTable, spec: ModelSpec, params: Params, kv: KVCaches, batch: EncoderBatch) -> KVCaches:
    """Run the encoder over whole inputs and store the keys and values that every decoder layer has of its output.

    Mutates the caches of cross attention in `kv`.
    """
    assert spec.encoder is not None, "a model without an encoder has no other input"
    scope = Scope(ops, params, spec.encoder.hidden_size, "encoder.")
    frames = _convolve(scope, spec.encoder, batch) if spec.encoder.num_features else None
    x = encoder(ops, spec.encoder, params, batch, "encoder.", frames)
    return write_cross(ops, spec, params, kv, batch, x)


def write_cross(
    ops: OpTable, spec: ModelSpec, params: Params, kv: KVCaches, batch: EncoderBatch, x: Array
) -> KVCaches:
    """Store the keys and values that layers with cross attention have of x, [num_tokens, hidden_size]."""
    caches = list(kv.cross)
    for i, layer in enumerate(spec.layers):
        if layer.cross is not None:
            at = Scope(ops, params, spec.hidden_size, f"layers.{i}.cross.")
            key, value = cross_keys(at, layer.cross, x)
            caches[i] = ops.write_kv(caches[i], key, value, batch.slot_mapping)
    return replace(kv, cross=caches)


def _convolve(scope: Scope, spec: ModelSpec, batch: EncoderBatch) -> Array:
    """From frames to the encoder's positions, [num_tokens, hidden_size], each convolution as a linear layer."""
    x, size, hidden = scope.ops.cast(batch.features, dtype=batch.dtype), spec.num_features, spec.hidden_size
    for n, convolution in enumerate(spec.convolutions):
        x, size = scope.ops.stack_rows(x, batch.windows[n]), convolution.kernel * (hidden if n else size)
        x = scope.linear(f"convolutions.{n}", x, hidden, size, bias=True, quantizable=False)
        x = scope.ops.act(x, activation=convolution.activation)
    return x
