"""The forward function of a vision-language model's encoder: from the patches of images to rows for the decoder.

The rows are kept by content, and `decoder` puts them in the place of token embeddings, in this step or a later one.
Arrays are touched through ops alone; nothing here looks at a value.
"""

from ..ops.table import OpTable
from ..stages import Array, EncoderBatch, ForwardBatch, KVCaches
from .encoder import encoder
from .encoder_decoder import write_cross
from .norms import Params, dense, normalize
from .spec import ModelSpec
from .vision_spec import ProjectorSpec, VisionSpec


def encode_images(ops: OpTable, spec: ModelSpec, params: Params, kv: KVCaches, batch: EncoderBatch) -> KVCaches:
    """Run the encoder over whole images and keep what the decoder reads of them: rows, or the keys and values that
    its cross attention has of them. Mutates `kv`."""
    vision = spec.vision
    assert vision is not None, "a model without an encoder of images has no images"
    rows = rows_of_images(ops, vision, params, batch)
    if vision.is_crossed:
        return write_cross(ops, spec, params, kv, batch, rows)
    return KVCaches(
        layers=kv.layers,
        group_of_layer=kv.group_of_layer,
        states=kv.states,
        state_group=kv.state_group,
        cross=kv.cross,
        cross_group=kv.cross_group,
        images=ops.store_rows(kv.images, rows, batch.slot_mapping),
    )


def rows_of_images(ops: OpTable, vision: VisionSpec, params: Params, batch: EncoderBatch) -> Array:
    """Rows as wide as the decoder, side by side where it reads several: [num_rows, num_row_parts * hidden_size]."""
    layers: dict[int, Array] = dict.fromkeys((*vision.joined, *(layer for layer, _ in vision.taps)))
    x = encoder(ops, vision.encoder, params, batch, "vision.", _embed(ops, vision, params, batch), layers)
    if vision.second is not None:
        x = encoder(ops, vision.second, params, batch, "second.", x, positions=batch.corner_ids[0])
    if vision.joined:
        x = ops.concat((x, *(layers[i] for i in vision.joined)))
    parts = [_project(ops, vision, vision.projector, params, "projector.", x, batch)]
    for n, (layer, projector) in enumerate(vision.taps):
        parts.append(_project(ops, vision, projector, params, f"taps.{n}.", layers[layer], batch))
    return ops.concat(parts) if vision.taps else parts[0]


def place_images(ops: OpTable, spec: ModelSpec, kv: KVCaches, batch: ForwardBatch, part: int, x: Array) -> Array:
    """x: [num_tokens, hidden_size] with the rows of images: part 0 in the place of token embeddings, others added."""
    if spec.vision is None or spec.vision.is_crossed or batch.image_rows is None:
        return x
    parts = ops.split(kv.images, (spec.hidden_size,) * spec.vision.num_row_parts)
    return ops.place_rows(x, parts[part], batch.image_rows, add=part > 0)


def _embed(ops: OpTable, vision: VisionSpec, params: Params, batch: EncoderBatch) -> Array:
    """Patches, [num_patches, num_features], as the residual stream before the first layer."""
    bias = params["vision.embed_patches.bias"] if vision.patch_bias else None
    x = ops.linear(ops.cast(batch.features, dtype=batch.dtype), params["vision.embed_patches.weight"], bias)
    if vision.has_class:
        x = ops.place_rows(x, params["vision.embed_class.weight"], batch.class_rows)
    if vision.patch_norm is not None:
        x = normalize(ops, vision.patch_norm, params, "vision.patch_norm.", x)
    for n in range(len(batch.corner_ids)):
        corner = ops.embedding(batch.corner_ids[n], params["vision.embed_corners.weight"])
        x = ops.add(x, ops.mul(corner, batch.corner_weights[n]))
    return x


def _project(
    ops: OpTable,
    vision: VisionSpec,
    projector: ProjectorSpec,
    params: Params,
    prefix: str,
    x: Array,
    batch: EncoderBatch,
) -> Array:
    """Squares of patches as rows of the decoder's size: [num_rows, hidden_size]."""
    if projector.patch_norm is not None:
        x = normalize(ops, projector.patch_norm, params, f"{prefix}patch_norm.", x)
    x = ops.stack_rows(x, batch.squares)
    if projector.is_mean:
        x = ops.mean_rows(x, batch.row_starts, batch.row_ends)
    if projector.norm is not None:
        x = normalize(ops, projector.norm, params, f"{prefix}norm.", x)
    for layer in projector.dense:
        x = dense(ops, layer, params, x, prefix)
    if len(batch.mixed_rows) > 0:
        x = _mix(ops, x, batch)
    if vision.has_newline:
        x = ops.place_rows(x, params[f"{prefix}newline.weight"], batch.newline_rows)
    return x


def _mix(ops: OpTable, x: Array, batch: EncoderBatch) -> Array:
    """Rows that lie between others: sums of these by weight."""

    def part(n: int) -> Array:
        return ops.mul(ops.stack_rows(x, batch.mixed_rows[n]), batch.mix_weights[n])

    total = part(0)
    for n in range(1, len(batch.mixed_rows)):
        total = ops.add(total, part(n))
    return total
