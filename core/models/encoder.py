"""The forward function of encoders: every token sees all tokens of its request, and nothing is cached.

It walks the same spec as `decoder`, arrays touched through ops alone; nothing here looks at a value.
"""

from ..ops.table import OpTable
from ..stages import Array, EncoderBatch, ForwardBatch
from .attention import split_and_normalize
from .declare import rope_numbers
from .feed_forward import feed_forward
from .norms import Params, normalize, relative_bias
from .spec import AttentionSpec, ModelSpec


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
    places = batch.positions if positions is None else positions
    residual = _embed(ops, spec, params, batch, prefix, embeddings, places)
    angles: list[tuple[Array, Array]] = []  # cosines and sines of each different rope
    for i, (layer, number) in enumerate(zip(spec.layers, rope_numbers(spec), strict=True)):
        layer_prefix, bias = f"{prefix}layers.{i}.", relative_bias(spec, params, prefix, i)
        if number == len(angles):
            rope = f"{prefix}rope.{number}."
            inv_freq, factor = params[f"{rope}inv_freq"], params[f"{rope}attention_factor"]
            axes = layer.attn.rope.axes if layer.attn.rope is not None else ()
            turned = batch.rope_positions if axes else batch.positions
            angles.append(ops.rotary_angles(turned, inv_freq, factor, axes=axes))
        cos, sin = (None, None) if number < 0 else angles[number]

        has_norm = layer.pre_norm and layer.attn_pre_norm
        x = normalize(ops, spec.norm, params, f"{layer_prefix}attn_norm.", residual) if has_norm else residual
        block = _attention(ops, layer.attn, params, f"{layer_prefix}attn.", x, cos, sin, bias, batch)
        if layer.post_norm:
            block = normalize(ops, spec.norm, params, f"{layer_prefix}attn_post_norm.", block)
        residual = ops.add(block, residual)
        if layer.norm_after_add:
            residual = normalize(ops, spec.norm, params, f"{layer_prefix}attn_post_norm.", residual)

        x = normalize(ops, spec.norm, params, f"{layer_prefix}mlp_norm.", residual) if layer.pre_norm else residual
        block = feed_forward(ops, layer, params, f"{layer_prefix}mlp.", x)
        if layer.post_norm:
            block = normalize(ops, spec.norm, params, f"{layer_prefix}mlp_post_norm.", block)
        residual = ops.add(block, residual)
        if layer.norm_after_add:
            residual = normalize(ops, spec.norm, params, f"{layer_prefix}mlp_post_norm.", residual)
        if behind_layers is not None and i in behind_layers:
            behind_layers[i] = residual
    return normalize(ops, spec.norm, params, f"{prefix}final_norm.", residual) if spec.final_norm else residual


def _embed(
    ops: OpTable,
    spec: ModelSpec,
    params: Params,
    batch: ForwardBatch | EncoderBatch,
    prefix: str,
    x: Array | None,
    positions: Array,
) -> Array:
    """The residual stream before the first layer, [num_tokens, hidden_size]."""
    if x is None:
        name = "embed_tokens.weight" if spec.shares_embedding else f"{prefix}embed_tokens.weight"
        x = ops.embedding(batch.input_ids, params[name])
    if spec.embed_scale != 1.0:
        x = ops.scale(x, spec.embed_scale)
    if spec.num_token_types:
        assert batch.token_types is not None, "the runner gives token types to models that have them"
        x = ops.add(x, ops.embedding(batch.token_types, params["embed_token_types.weight"]))
    if spec.num_learned_positions:
        x = ops.add(x, ops.embedding(positions, params[f"{prefix}embed_positions.weight"]))
    if spec.embed_norm:
        x = normalize(ops, spec.norm, params, f"{prefix}embed_norm.", x)
        if spec.layers[0].attn.has_padding:  # behind the patches of a tile: rows of zeros
            x = ops.mul(x, batch.is_patch)
    return ops.linear(x, params["embed_in.weight"], params["embed_in.bias"]) if spec.embed_size else x


def _attention(
    ops: OpTable,
    attn: AttentionSpec,
    params: Params,
    prefix: str,
    x: Array,
    cos: Array | None,
    sin: Array | None,
    relative_bias: Array | None,
    batch: ForwardBatch | EncoderBatch,
) -> Array:
    """Self-attention of [num_tokens, hidden_size] in both directions; returns that shape."""
    head_dim = attn.head_dim
    bias = params[f"{prefix}qkv_proj.bias"] if attn.qkv_bias else None
    qkv = ops.linear(x, params[f"{prefix}qkv_proj.weight"], bias)
    sizes = (attn.num_heads * head_dim, attn.num_kv_heads * head_dim, attn.num_kv_heads * head_dim)
    query, key, value = ops.split(qkv, sizes)
    query = split_and_normalize(ops, attn, params, f"{prefix}q_norm.", query)
    key = split_and_normalize(ops, attn, params, f"{prefix}k_norm.", key)
    value = ops.split_heads(value, head_dim=head_dim)
    if attn.rope is not None:
        query = ops.rope(query, cos, sin, interleaved=attn.rope.interleaved)
        key = ops.rope(key, cos, sin, interleaved=attn.rope.interleaved)
    if attn.has_padding:
        marks = ops.embedding(batch.padding, params["vision.marks.weight"])
        marks = ops.split_heads(marks, head_dim=8)
        query, key = ops.concat((query, marks)), ops.concat((key, ops.scale(marks, -1.0)))
        value = ops.concat((value, ops.scale(marks, 0.0)))
    starts = batch.window_start_loc if attn.in_window else batch.query_start_loc
    out = ops.encoder_attention(
        query,
        key,
        value,
        starts,
        relative_bias,
        scale=attn.scale,
        window=attn.window,
        softcap=attn.softcap,
        max_query_len=batch.max_query_len,
    )
    if attn.has_padding:
        out, _ = ops.split(out, (head_dim, 8))
    bias = params[f"{prefix}o_proj.bias"] if attn.o_bias else None
    return ops.linear(ops.merge_heads(out), params[f"{prefix}o_proj.weight"], bias)
