"""The forward functions of encoder-decoder models: the encoder's half of a step, and cross attention in the decoder.

What the encoder makes of a request's other input is turned into keys and values of each decoder layer once, and kept
in the blocks of the Cross KV group; `decoder` walks its own layers and calls `cross_block` in each. Arrays are
touched through ops alone; nothing here looks at a value.
"""

from typing import Literal

from ..ops.table import OpTable
from ..stages import Array, EncoderBatch, ForwardBatch, KVCaches
from .encoder import encoder
from .norms import Params, add_and_normalize, normalize
from .spec import ModelSpec


def encode(ops: OpTable, spec: ModelSpec, params: Params, kv: KVCaches, batch: EncoderBatch) -> KVCaches:
    """Run the encoder over whole inputs and store the keys and values that every decoder layer has of its output.

    Mutates the caches of cross attention in `kv`.
    """
    assert spec.encoder is not None, "a model without an encoder has no other input"
    frames = _convolve(ops, spec.encoder, params, batch) if spec.encoder.num_features else None
    x = encoder(ops, spec.encoder, params, batch, "encoder.", frames)
    return write_cross(ops, spec, params, kv, batch, x)


def write_cross(
    ops: OpTable, spec: ModelSpec, params: Params, kv: KVCaches, batch: EncoderBatch, x: Array
) -> KVCaches:
    """Store the keys and values that layers with cross attention have of x, [num_tokens, hidden_size]."""
    caches: list[Array] = []
    for i, layer in enumerate(spec.layers):
        cross, prefix = layer.cross, f"layers.{i}.cross."
        if cross is None:
            caches.append(kv.cross[i])
            continue
        size = cross.num_kv_heads * cross.head_dim
        bias = params[f"{prefix}kv_proj.bias"] if cross.bias else None
        key, value = ops.split(ops.linear(x, params[f"{prefix}kv_proj.weight"], bias), (size, size))
        key, value = (ops.split_heads(part, head_dim=cross.head_dim) for part in (key, value))
        if cross.qk_norm is not None:
            key = normalize(ops, cross.qk_norm, params, f"{prefix}k_norm.", key)
        caches.append(ops.write_kv(kv.cross[i], key, value, batch.slot_mapping))
    return KVCaches(
        layers=kv.layers,
        group_of_layer=kv.group_of_layer,
        states=kv.states,
        state_group=kv.state_group,
        cross=caches,
        cross_group=kv.cross_group,
        images=kv.images,
    )


def cross_block(
    ops: OpTable,
    spec: ModelSpec,
    params: Params,
    layer_idx: int,
    block: Array,
    residual: Array,
    kv: KVCaches,
    batch: ForwardBatch,
) -> tuple[Array, Array]:
    """Cross attention of one decoder layer: takes and returns (output of the last block, residual).

    block, residual: [num_tokens, hidden_size].
    """
    layer, prefix = spec.layers[layer_idx], f"layers.{layer_idx}."
    cross = layer.cross
    assert cross is not None and batch.encoder_lens is not None, "the runner says how long the encoder's outputs are"
    if layer.norm_after_add:
        total = ops.add(block, residual)
        block, residual = None, normalize(ops, spec.norm, params, f"{prefix}attn_post_norm.", total)
    norm = f"{prefix}cross_norm."
    x, residual = add_and_normalize(ops, spec.norm, params, norm, block, residual, layer.pre_norm)
    bias = params[f"{prefix}cross.q_proj.bias"] if cross.bias else None
    query = ops.linear(x, params[f"{prefix}cross.q_proj.weight"], bias)
    query = ops.split_heads(query, head_dim=cross.head_dim)
    if cross.qk_norm is not None:
        query = normalize(ops, cross.qk_norm, params, f"{prefix}cross.q_norm.", query)
    out = ops.paged_attention(
        query,
        kv.cross[layer_idx],
        batch.query_start_loc,
        batch.encoder_lens,
        batch.block_tables[kv.cross_group],
        scale=cross.scale,
        causal=False,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_encoder_len,
    )
    bias = params[f"{prefix}cross.o_proj.bias"] if cross.bias else None
    out = ops.linear(ops.merge_heads(out), params[f"{prefix}cross.o_proj.weight"], bias)
    return pass_gate(ops, spec, params, layer_idx, "cross", out, batch), residual


def pass_gate(
    ops: OpTable,
    spec: ModelSpec,
    params: Params,
    layer_idx: int,
    name: Literal["cross", "mlp"],
    x: Array,
    batch: ForwardBatch,
) -> Array:
    """What a layer with gated cross attention adds, 0 where a token sees nothing; that of others as it is."""
    cross = spec.layers[layer_idx].cross
    if cross is None or not cross.gated:
        return x
    x = ops.mul(x, params[f"layers.{layer_idx}.cross.{'gate' if name == 'cross' else 'mlp_gate'}"])
    return ops.mul(x, ops.embedding(batch.token_types, params[f"sees.{name}.weight"]))


def _convolve(ops: OpTable, spec: ModelSpec, params: Params, batch: EncoderBatch) -> Array:
    """From frames to the encoder's positions, [num_tokens, hidden_size], each convolution as a linear layer."""
    x = ops.cast(batch.features, dtype=batch.dtype)
    for n, convolution in enumerate(spec.convolutions):
        name = f"encoder.convolutions.{n}"
        x = ops.linear(ops.stack_rows(x, batch.windows[n]), params[f"{name}.weight"], params[f"{name}.bias"])
        x = ops.act(x, activation=convolution.activation)
    return x
