"""The forward function of a vision-language model's encoder: from the patches of images to rows for the decoder.

The rows are kept by content, and `decoder` puts them in the place of token embeddings, in this step or a later one.
Arrays are touched through ops alone; nothing here looks at a value.
"""

from dataclasses import replace

from ..ops.table import OpTable
from ..stages import Array, EncoderBatch, KVCaches
from .encoder import encoder
from .encoder_decoder import write_cross
from .scope import Params, Scope
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
    return replace(kv, images=ops.store_rows(kv.images, rows, batch.slot_mapping))


def rows_of_images(ops: OpTable, vision: VisionSpec, params: Params, batch: EncoderBatch) -> Array:
    """Rows as wide as the decoder, side by side where it reads several: [num_rows, num_row_parts * hidden_size]."""
    scope = Scope(ops, params, vision.encoder.hidden_size)
    layers: dict[int, Array] = dict.fromkeys((*vision.chosen, *vision.joined, *(layer for layer, _ in vision.taps)))
    patches = _embed(scope.inside("vision"), vision, batch)
    x = encoder(ops, vision.encoder, params, batch, "vision.", patches, layers)
    if vision.second is not None:
        x = encoder(ops, vision.second, params, batch, "second.", x, positions=batch.corner_ids[0])
    if vision.chosen:
        x = ops.concat([layers[i] for i in vision.chosen])
    if vision.joined:
        x = ops.concat((x, *(layers[i] for i in vision.joined)))
    parts = [_project(scope.inside("projector"), vision, vision.projector, x, batch)]
    for n, (layer, projector) in enumerate(vision.taps):
        parts.append(_project(scope.inside(f"taps.{n}"), vision, projector, layers[layer], batch))
    return ops.concat(parts) if vision.taps else parts[0]


def _embed(at: Scope, vision: VisionSpec, batch: EncoderBatch) -> Array:
    """Patches, [num_patches, num_features], as the residual stream before the first layer."""
    ops, encoder, hidden = at.ops, vision.encoder, vision.encoder.hidden_size
    x, num_features = ops.cast(batch.features, dtype=batch.dtype), encoder.num_features
    x = at.linear("embed_patches", x, hidden, num_features, bias=vision.patch_bias, quantizable=False)
    if vision.has_class:
        x = ops.place_rows(x, at.param("embed_class.weight", 1, hidden), batch.class_rows)
    if vision.patch_norm is not None:
        x = at.normalize(vision.patch_norm, "patch_norm", x)
    num_places = len(vision.tile_shapes) and (len(vision.tile_shapes) + 1) * vision.max_tiles
    rows = {"tiles": num_places, "tile_patches": num_places * encoder.num_learned_positions}
    parts = {f"embed_{name}.weight": count for name, count in rows.items() if count}
    for n in range(len(batch.corner_ids)):
        table = at.table("embed_corners", vision.num_corners + sum(rows.values()), hidden, parts=parts)
        corner = ops.embedding(batch.corner_ids[n], table)
        x = ops.add(x, ops.mul(corner, batch.corner_weights[n]))
    return x


def _project(at: Scope, vision: VisionSpec, projector: ProjectorSpec, x: Array, batch: EncoderBatch) -> Array:
    """Squares of patches as rows of the decoder's size: [num_rows, hidden_size]."""
    ops = at.ops
    if projector.patch_norm is not None:
        x = at.normalize(projector.patch_norm, "patch_norm", x)
    x = ops.stack_rows(x, batch.squares)
    if projector.is_mean:
        x = ops.mean_rows(x, batch.row_starts, batch.row_ends)
    if projector.norm is not None:
        x = at.normalize(projector.norm, "norm", x, projector.dense[0].in_features)
    for layer in projector.dense:
        x = at.dense(layer, x, num_joined=len(vision.joined))
    if len(batch.mixed_rows) > 0:
        x = _mix(ops, x, batch)
    if vision.has_newline:
        newline = at.param("newline.weight", 1, projector.dense[-1].out_features)
        x = ops.place_rows(x, newline, batch.newline_rows)
    return x


def _mix(ops: OpTable, x: Array, batch: EncoderBatch) -> Array:
    """Rows that lie between others: sums of these by weight."""
    total: Array = None
    for n in range(len(batch.mixed_rows)):
        part = ops.mul(ops.stack_rows(x, batch.mixed_rows[n]), batch.mix_weights[n])
        total = part if total is None else ops.add(total, part)
    return total
