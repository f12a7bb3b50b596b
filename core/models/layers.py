"""The layers of a model inside a forward function: one walk over a spec, for decoders and encoders alike.

Nothing here looks at a value, so that the walk can be run, captured or traced into a program.
"""

import dataclasses
from functools import partial

from ..stages import Array
from .altup import altup_layer, join_streams, make_streams
from .attention import attention, cross_attention
from .constants import pick_rows, rows_of
from .feed_forward import dense_and_experts, experts_of, feed_forward
from .layer_inputs import layer_inputs, place_images, read_input
from .memory import Memory, Sight
from .mixer import mix, mix_channels
from .rope import num_rope_variants, rope_numbers, rope_tables
from .scope import Scope, Stream
from .shared_block import shared_block
from .spec import LayerSpec, ModelSpec, RopeSpec


def walk(
    scope: Scope, spec: ModelSpec, x: Array, memory: Memory, behind_layers: dict[int, Array] | None = None
) -> Array:
    """The residual stream behind the last norm, of what it is before the first layer: [num_tokens, hidden_size].

    Each layer keeps the keys and values of the whole batch before its attention reads any. behind_layers: takes the
    stream behind those layers that are its keys.
    """
    embeddings, stream = x, Stream(spec.norm, x)
    inputs, sights = layer_inputs(scope, spec, memory.batch, x), _sights(scope, spec, memory)
    streams = () if spec.altup is None else make_streams(scope, spec.altup, x)
    for i, (layer, sight) in enumerate(zip(spec.layers, sights, strict=True)):
        at, own_input = scope.inside(f"layers.{i}"), inputs[i] if spec.layer_input_size else None
        if spec.vision is not None and 0 < i <= len(spec.vision.taps):
            stream.residual = place_images(scope, spec, sight.caches, i, stream.residual)
        if spec.altup is not None:
            streams = altup_layer(at, spec, spec.altup, layer, streams, own_input, sight)
            continue
        x = _mix_tokens(at, spec, layer, stream, embeddings, sight)
        if layer.has_feed_forward and _sees_other_input(spec, layer, memory):
            _feed_forward(at, spec, layer, stream, x, own_input, sight)
        if behind_layers is not None and i in behind_layers:
            stream.settle(at)
            behind_layers[i] = stream.residual
    if spec.altup is not None:
        stream.residual = join_streams(scope, spec.altup, streams)
    if spec.final_eps:
        stream.norm = dataclasses.replace(stream.norm, eps=spec.final_eps)
    return stream.read(scope, "final_norm", spec.final_norm)


def _sights(scope: Scope, spec: ModelSpec, memory: Memory) -> list[Sight]:
    """What each layer sees; layers with the same rope share its cosines and sines."""
    angles: dict[int, tuple[Array, Array]] = {}
    sights: list[Sight] = []
    for i, (layer, number) in enumerate(zip(spec.layers, rope_numbers(spec), strict=True)):
        cos, sin, bias = None, None, None
        if layer.attn.rope is not None:
            if number not in angles:
                angles[number] = _angles(scope.inside(f"rope.{number}"), layer.attn.rope, memory)
            cos, sin = angles[number]
        if spec.num_relative_buckets:
            own = scope.inside(f"layers.{i}.attn") if spec.relative_bias_by_layer else scope
            bias = _relative_bias(own, spec, layer.attn.num_heads)
        sights.append(Sight(memory=memory, layer_idx=i, cos=cos, sin=sin, relative_bias=bias))
    return sights


def _relative_bias(at: Scope, spec: ModelSpec, num_heads: int) -> Array:
    """The bias of attention by distance, in the buckets of ops: [num_buckets, num_heads]."""
    name, num_rows, rows = "relative_bias.weight", spec.num_relative_buckets, spec.relative_rows
    if not rows:
        return at.param(name, num_rows, num_heads)
    parts = {name: num_rows}
    return at.param("relative_biases", len(rows), num_heads, parts=parts, combine=partial(pick_rows, rows))


def _angles(at: Scope, rope: RopeSpec, memory: Memory) -> tuple[Array, Array]:
    """Cosines and sines of this step for one rope."""
    batch, variants = memory.batch, num_rope_variants(rope)
    inv_freq = at.constant("inv_freq", variants, rope.rotary_dim // 2, compute=lambda: rope_tables(rope)[0])
    factor = at.constant("attention_factor", variants, compute=lambda: rope_tables(rope)[1])
    places = batch.rope_positions if rope.axes else batch.positions
    rows = batch.rope_rows if variants > 1 else None
    return at.ops.rotary_angles(places, inv_freq, factor, rows, axes=rope.axes)


def _mix_tokens(
    at: Scope, spec: ModelSpec, layer: LayerSpec, stream: Stream, embeddings: Array, sight: Sight
) -> Array:
    """Attention, a recurrence, or both: what they give waits in the stream. Returns what they read."""
    ops = at.ops
    x: Array = None
    block: Array = None
    if layer.shared is not None:
        stream.settle(at)
        y = shared_block(at, layer.shared, layer.attn, spec.norm, stream.residual, embeddings, sight)
        x = at.normalize(spec.norm, "attn_norm", ops.add(stream.residual, y))
    elif layer.has_attention or layer.mixer is not None:
        x = stream.read(at, "attn_norm", layer.pre_norm and layer.attn_pre_norm)
        if layer.stream_scales is not None:
            stream.residual = at.scaled(x, layer.stream_scales[0])
    if layer.has_attention and layer.shared is None:
        block = attention(at.inside("attn"), layer.attn, x, sight)
    if layer.mixer is not None:
        mixed = mix(at.inside("mixer"), layer.mixer, x, sight)
        block = mixed if block is None else ops.add(block, mixed)
    if block is not None:
        block = at.normalize(spec.norm, "attn_post_norm", block) if layer.post_norm else block
        stream.block = at.scaled(block, layer.residual_scale)
    if layer.mixer is not None and layer.mixer.mlp_size:
        x = stream.read(at, "mlp_norm")
        stream.block = mix_channels(at.inside("mlp"), layer.mixer, x, sight)
    if layer.stream_scale != 1.0:
        stream.settle(at)
        stream.residual = ops.scale(stream.residual, layer.stream_scale)
    return x


def _feed_forward(
    at: Scope, spec: ModelSpec, layer: LayerSpec, stream: Stream, x: Array, own_input: Array | None, sight: Sight
) -> None:
    """Cross attention, if the layer has any, and the feed-forward block: what it gives waits in the stream.

    x: what attention read. own_input: what the layer reads of the tokens themselves.
    """
    ops, norm, mlp = at.ops, spec.norm, at.inside("mlp")
    if layer.parallel:
        x = x if layer.shared_norm else at.normalize(norm, "mlp_norm", stream.residual)
        stream.block = ops.add(stream.block, feed_forward(mlp, layer, x))
        return
    if layer.norm_after_add:
        stream.renormalize(at, "attn_post_norm")
    if layer.cross is not None:
        x = stream.read(at, "cross_norm", layer.pre_norm)
        block = cross_attention(at.inside("cross"), layer.cross, x, sight)
        stream.block = _gated(at, layer, "gate", "sees.cross", (0, 1, 1), block, sight)
        if layer.norm_after_add:
            stream.renormalize(at, "cross_post_norm")
    x = stream.read(at, "mlp_norm", layer.pre_norm)
    if layer.stream_scales is not None:
        stream.residual = at.scaled(x, layer.stream_scales[1])
    if layer.moe is not None and layer.moe_beside:
        block = dense_and_experts(at, layer, layer.moe, norm, x, stream.residual)
    else:
        block = _gated(at, layer, "mlp_gate", "sees.mlp", (0, 0, 1), feed_forward(mlp, layer, x), sight)
    if stream.ahead is not None:
        block, stream.ahead = ops.add(block, stream.ahead), None
    if layer.moe is not None and layer.moe_ahead:
        stream.ahead = experts_of(at.inside("moe"), layer.moe, x)
    block = at.normalize(norm, "mlp_post_norm", block) if layer.post_norm else block
    stream.block = at.scaled(block, layer.residual_scale)
    if layer.norm_after_add:
        stream.renormalize(at, "mlp_post_norm")
    if layer.has_scalar:
        stream.settle(at)
        if own_input is not None:
            read = read_input(at, spec, layer, own_input, stream.residual)
            stream.residual = ops.add(read, stream.residual)
        stream.residual = ops.mul(stream.residual, at.param("scalar", at.hidden_size))


def _sees_other_input(spec: ModelSpec, layer: LayerSpec, memory: Memory) -> bool:
    """False for a layer that reads images, in a step without any: it does nothing then."""
    return layer.cross is None or spec.vision is None or memory.batch.encoder_lens is not None


def _gated(
    at: Scope, layer: LayerSpec, gate: str, sees: str, opened: tuple[int, ...], x: Array, sight: Sight
) -> Array:
    """What a layer with gated cross attention adds, 0 where a token sees nothing; that of others as it is. opened: 1
    for each token type that lets it pass."""
    if not layer.cross_gated:
        return x
    ops, size = at.ops, at.hidden_size
    doors = at.root.table(sees, len(opened), size, compute=partial(rows_of, opened, size))
    x = ops.mul(x, at.param(f"cross.{gate}", size))
    return ops.mul(x, ops.embedding(sight.memory.batch.token_types, doors))
