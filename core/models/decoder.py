"""The forward function of decoder-only models: one walk over a spec, arrays touched through ops alone.

The same function runs eagerly, is captured, or is traced into a program; so nothing here looks at a value.
"""

from ..ops.table import OpTable
from ..stages import Array, ForwardBatch, KVCaches
from .altup import altup_layer, join_streams, make_streams
from .attention import attention
from .declare import rope_numbers
from .encoder_decoder import cross_block, pass_gate
from .feed_forward import dense_and_experts, experts_of, feed_forward
from .layer_inputs import finish_layer, layer_inputs
from .mixer import States, mix, mix_channels
from .norms import Params, add_and_normalize, dense, normalize, relative_bias
from .rope import num_rope_variants
from .shared_block import shared_block
from .spec import ModelSpec, RopeSpec
from .vision import place_images


def decoder(
    ops: OpTable, spec: ModelSpec, params: Params, kv: KVCaches, batch: ForwardBatch
) -> tuple[Array, KVCaches]:
    """Hidden states after the last norm, [num_tokens, hidden_size], and the caches with this step's keys and values.

    batch.input_ids holds token ids only (the runner has filled in what was unknown). Each layer writes the keys
    and values of the whole batch before its attention reads any. Mutates the caches in `kv`.
    """
    residual = embeddings = _embed(ops, spec, params, kv, batch)
    inputs = layer_inputs(ops, spec, params, batch, embeddings)
    block: Array = None  # output of the last attention or feed-forward block, not yet added to the residual
    ahead: Array = None  # output of a layer's experts that the next layer adds
    angles: list[tuple[Array, Array]] = []  # cosines and sines of each different rope
    caches: list[Array] = []
    states: list[States] = []
    streams = () if spec.altup is None else make_streams(ops, spec.altup, params, residual)
    for i, (layer, number) in enumerate(zip(spec.layers, rope_numbers(spec), strict=True)):
        prefix = f"layers.{i}."
        if layer.attn.rope is not None and number == len(angles):
            angles.append(_angles(ops, layer.attn.rope, f"rope.{number}.", params, batch))
        cos, sin = (None, None) if number < 0 else angles[number]
        if spec.vision is not None and 0 < i <= len(spec.vision.taps):
            residual = place_images(ops, spec, kv, batch, i, residual)

        cache, state = kv.layers[i], kv.states[i] if layer.mixer is not None else ()
        owner = layer.attn.kv_layer if layer.attn.kv_layer >= 0 else i
        group = kv.group_of_layer[owner]
        if spec.altup is not None:
            read = cache if owner == i else caches[owner]
            streams, read = altup_layer(
                ops, spec, spec.altup, layer, params, prefix, streams, inputs[i], cos, sin, read, group, batch
            )
            caches.append(read if owner == i else cache)
            states.append(state)
            continue
        if layer.has_attention or layer.mixer is not None:
            norm = f"{prefix}attn_norm."
            if layer.shared is not None:
                residual = residual if block is None else ops.add(block, residual)
                y, cache = shared_block(
                    ops, layer.shared, layer.attn, spec.norm, params, residual, embeddings, cos, sin, cache,
                    group, batch,
                )  # fmt: skip
                y = ops.linear(y, params[f"{prefix}shared.out_proj.weight"])
                x = normalize(ops, spec.norm, params, norm, ops.add(residual, y))
            else:
                has_norm = layer.pre_norm and layer.attn_pre_norm
                x, residual = add_and_normalize(ops, spec.norm, params, norm, block, residual, has_norm)
                residual = residual if layer.stream_scales is None else _scaled(ops, x, layer.stream_scales[0])
            block = None
            if layer.has_attention and layer.shared is None:
                bias, read = relative_bias(spec, params, "", i), cache if owner == i else caches[owner]
                block, read = attention(
                    ops, layer.attn, params, f"{prefix}attn.", x, cos, sin, read, group, batch, bias
                )
                cache = read if owner == i else cache
            if layer.mixer is not None:
                mixed, state = mix(ops, layer.mixer, params, f"{prefix}mixer.", x, state, kv.state_group, batch)
                block = mixed if block is None else ops.add(block, mixed)
            if layer.post_norm:
                block = normalize(ops, spec.norm, params, f"{prefix}attn_post_norm.", block)
            if layer.residual_scale != 1.0:
                block = ops.scale(block, layer.residual_scale)
        if layer.mixer is not None and layer.mixer.mlp_size:
            x, residual = add_and_normalize(ops, spec.norm, params, f"{prefix}mlp_norm.", block, residual, True)
            block, state = mix_channels(ops, layer.mixer, params, f"{prefix}mlp.", x, state, kv.state_group, batch)
        if layer.stream_scale != 1.0:
            residual, block = ops.scale(ops.add(block, residual), layer.stream_scale), None
        caches.append(cache)
        states.append(state)
        if not layer.has_feed_forward:
            continue

        post_norm = f"{prefix}attn_post_norm."
        if layer.cross is not None:
            if spec.vision is not None and batch.encoder_lens is None:  # no token sees an image
                continue
            block, residual = cross_block(ops, spec, params, i, block, residual, kv, batch)
            post_norm = f"{prefix}cross_post_norm."

        norm = f"{prefix}mlp_norm."
        if layer.parallel:
            y = x if layer.shared_norm else normalize(ops, spec.norm, params, norm, residual)
            block = ops.add(block, feed_forward(ops, layer, params, f"{prefix}mlp.", y))
            continue
        if layer.norm_after_add:
            total = ops.add(block, residual)
            block, residual = None, normalize(ops, spec.norm, params, post_norm, total)
        x, residual = add_and_normalize(ops, spec.norm, params, norm, block, residual, layer.pre_norm)
        residual = residual if layer.stream_scales is None else _scaled(ops, x, layer.stream_scales[1])
        if layer.moe is not None and layer.moe_beside:
            block = dense_and_experts(ops, layer, layer.moe, spec.norm, params, prefix, x, residual)
        else:
            block = feed_forward(ops, layer, params, f"{prefix}mlp.", x)
            block = pass_gate(ops, spec, params, i, "mlp", block, batch)
        block, ahead = block if ahead is None else ops.add(block, ahead), None
        if layer.moe is not None and layer.moe_ahead:
            ahead = experts_of(ops, layer.moe, params, f"{prefix}moe.", x)
        if layer.post_norm:
            block = normalize(ops, spec.norm, params, f"{prefix}mlp_post_norm.", block)
        if layer.residual_scale != 1.0:
            block = ops.scale(block, layer.residual_scale)
        if layer.norm_after_add:
            total = ops.add(block, residual)
            block, residual = None, normalize(ops, spec.norm, params, f"{prefix}mlp_post_norm.", total)
        if layer.has_scalar:
            total, read_input = ops.add(block, residual), inputs[i] if spec.layer_input_size else None
            block, residual = None, finish_layer(ops, spec, layer, params, prefix, read_input, total)
    if spec.altup is not None:
        residual = join_streams(ops, spec.altup, params, streams)
    hidden_states, _ = add_and_normalize(ops, spec.norm, params, "final_norm.", block, residual, spec.final_norm)
    caches_after = KVCaches(
        layers=caches,
        group_of_layer=kv.group_of_layer,
        states=states,
        state_group=kv.state_group,
        cross=kv.cross,
        cross_group=kv.cross_group,
        images=kv.images,
    )
    return hidden_states, caches_after


def compute_logits(ops: OpTable, spec: ModelSpec, params: Params, hidden_states: Array) -> Array:
    """Logits of gathered hidden states: [n, hidden_size] -> float32 [n, vocab_size]."""
    weight = params["embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight"]
    bias = params["lm_head.bias"] if spec.lm_head_bias else None
    if spec.embed_size:
        hidden_states = ops.linear(hidden_states, params["project_out.weight"])
    if spec.head_transform is not None:
        hidden_states = dense(ops, spec.head_transform, params, hidden_states)
    logits = ops.cast(ops.linear(hidden_states, weight, bias), dtype="float32")
    if spec.logit_scale != 1.0:
        logits = ops.scale(logits, spec.logit_scale)
    return ops.softcap(logits, spec.logit_softcap) if spec.logit_softcap else logits


def _scaled(ops: OpTable, x: Array, factor: float) -> Array:
    return x if factor == 1.0 else ops.scale(x, factor)


def _embed(ops: OpTable, spec: ModelSpec, params: Params, kv: KVCaches, batch: ForwardBatch) -> Array:
    """The residual stream before the first layer, [num_tokens, hidden_size]."""
    x = ops.embedding(batch.input_ids, params["embed_tokens.weight"])
    if spec.embed_scale != 1.0:
        x = ops.scale(x, spec.embed_scale)
    if spec.embed_size:
        x = ops.linear(x, params["project_in.weight"])
    x = place_images(ops, spec, kv, batch, 0, x)
    if spec.num_learned_positions:
        x = ops.add(x, ops.embedding(batch.positions, params["embed_positions.weight"]))
    return normalize(ops, spec.norm, params, "embed_norm.", x) if spec.embed_norm else x


def _angles(ops: OpTable, rope: RopeSpec, prefix: str, params: Params, batch: ForwardBatch) -> tuple[Array, Array]:
    """Cosines and sines of this step for one rope."""
    rows = batch.rope_rows if num_rope_variants(rope) > 1 else None
    inv_freq, attention_factor = params[f"{prefix}inv_freq"], params[f"{prefix}attention_factor"]
    places = batch.rope_positions if rope.axes else batch.positions
    return ops.rotary_angles(places, inv_freq, attention_factor, rows, axes=rope.axes)
