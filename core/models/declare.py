"""The parameters of a spec, in the order in which a forward pass reads them."""

import math
from dataclasses import replace
from functools import partial
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from .declaration import Declaration, filled
from .mixer_params import declare_channel_mix, declare_mixer
from .params import Param
from .spec import (
    AltUpSpec,
    AttentionSpec,
    CrossSpec,
    LatentSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    RopeSpec,
    SharedSpec,
)
from .vision_spec import ProjectorSpec, VisionSpec


def declare_params(spec: ModelSpec) -> tuple[Param, ...]:
    """Every parameter of a model. A tied model has no lm_head.weight: embed_tokens.weight serves as both."""
    if spec.foreign is not None:
        return spec.foreign.params
    at = Declaration()
    _model(at, spec)
    if spec.encoder is not None:
        _model(at.inside("encoder"), spec.encoder)
    return (*at.params, *(image_params(spec.vision) if spec.vision is not None else ()))


def distinct_ropes(spec: ModelSpec) -> tuple[RopeSpec, ...]:
    """The different ropes of a model by first use; rope n has the tables rope.{n}.inv_freq and .attention_factor."""
    return tuple(dict.fromkeys(layer.attn.rope for layer in spec.layers if layer.attn.rope is not None))


def rope_numbers(spec: ModelSpec) -> list[int]:
    """For each layer, which of `distinct_ropes` it turns by; -1 if none."""
    by_value: dict[RopeSpec, int] = {}
    by_id: dict[int, int] = {}  # layers share objects, and comparing LongRoPE's lists costs more than an op
    numbers = []
    for layer in spec.layers:
        rope = layer.attn.rope
        number = -1 if rope is None else by_id.get(id(rope), -1)
        if rope is not None and number < 0:
            number = by_id[id(rope)] = by_value.setdefault(rope, len(by_value))
        numbers.append(number)
    return numbers


def alibi_slopes(attn: AttentionSpec) -> npt.NDArray[np.float32]:
    """Slopes of linear position biases, [num_heads]; a number of heads that is no power of 2 takes every other
    slope of the next power (Press et al. 2021)."""
    num_slopes = 2 ** math.ceil(math.log2(attn.num_heads))
    exponents = np.arange(1, num_slopes + 1, dtype=np.float64) * (attn.alibi_max_bias / num_slopes)
    slopes = np.exp2(-exponents)
    if num_slopes != attn.num_heads:
        slopes = np.concatenate([slopes[1::2], slopes[::2]])[: attn.num_heads]
    return np.asarray(slopes * attn.alibi_scale, dtype=np.float32)


def sinusoids(spec: ModelSpec, size: int) -> npt.NDArray[np.float32]:
    """The position embedding of a spec that has no learned one, [num_learned_positions, size]."""
    half = size // 2
    last = half - 1 if spec.sinusoids == "halves" else half
    frequencies = np.exp(np.arange(half) * -(math.log(10000) / last))
    angles = np.arange(spec.first_position, spec.first_position + spec.num_learned_positions)[:, None] * frequencies
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def _model(at: Declaration, spec: ModelSpec) -> None:
    """A decoder or an encoder."""
    hidden, is_encoder = spec.hidden_size, spec.kind == "encoder"
    size = spec.embed_size or hidden
    _embeddings(at, spec, size)
    if spec.num_relative_buckets and not spec.relative_bias_by_layer:
        _relative_bias(at, spec)
    if is_encoder and spec.embed_size:
        at.linear("embed_in", hidden, size, bias=True)
    for n, rope in enumerate(distinct_ropes(spec)):
        at.inside(f"rope.{n}").rope(rope)
    if spec.vision is not None and spec.vision.is_crossed:
        for name, opened in (("cross", (0, 1, 1)), ("mlp", (0, 0, 1))):
            at.add(f"sees.{name}.weight", 3, hidden, kind="embedding", compute=partial(_rows, opened, hidden))
    for i, layer in enumerate(spec.layers):
        _layer(at.inside(f"layers.{i}"), layer, i, spec)
    if spec.final_norm:
        at.norm(spec.norm, "final_norm", hidden)
    if spec.pooler is not None:  # then there is no head for tokens
        for dense in spec.pooler.dense:
            at.dense(dense)
    elif not is_encoder:
        _head(at, spec, size)


def _embeddings(at: Declaration, spec: ModelSpec, size: int) -> None:
    """What comes before the layers. size: of embeddings."""
    hidden, is_encoder, num_inputs = spec.hidden_size, spec.kind == "encoder", spec.num_features
    for n, convolution in enumerate(spec.convolutions):
        at.linear(f"convolutions.{n}", hidden, convolution.kernel * num_inputs, bias=True, quantizable=False)
        num_inputs = hidden
    if not spec.num_features and not spec.shares_embedding:
        num_tokens = spec.vocab_size + spec.num_extra_tokens
        at.add("embed_tokens.weight", num_tokens, size, kind="embedding", shard="vocab", quantizable=True)
    if spec.embed_size and not is_encoder:
        at.linear("project_in", hidden, size)
    size = size if is_encoder else hidden
    if spec.num_token_types:
        at.add("embed_token_types.weight", spec.num_token_types, size, kind="embedding")
    if rows := spec.num_learned_positions:
        table = partial(sinusoids, spec, size) if spec.sinusoids else None
        at.add("embed_positions.weight", rows, size, kind="embedding", compute=table)
    if spec.embed_norm:
        at.norm(spec.norm, "embed_norm", size)
    if own_size := spec.layer_input_size * spec.num_layers:
        at.add("embed_layers.weight", spec.vocab_size, own_size, kind="embedding", shard="vocab", quantizable=True)
        at.linear("embed_layers_proj", own_size, hidden)
        at.norm(spec.norm, "embed_layers_norm", spec.layer_input_size)
    if spec.altup is not None:
        for way in ("in", "out"):
            for n in range(spec.altup.num_streams - 1):
                at.linear(f"altup_{way}.{n}", hidden, hidden)


def _head(at: Declaration, spec: ModelSpec, size: int) -> None:
    """From hidden states to logits. size: of embeddings."""
    if spec.embed_size:
        at.linear("project_out", size, spec.hidden_size)
    if spec.head_transform is not None:
        at.dense(spec.head_transform)
    if not spec.tie_word_embeddings:
        unit_rows = spec.lm_head_unit_rows
        at.add(
            "lm_head.weight",
            spec.vocab_size,
            size,
            kind="linear",
            shard="vocab",
            quantizable=True,
            unit_rows=unit_rows,
        )
    if spec.lm_head_bias:
        none = partial(filled, (spec.vocab_size,), 0.0) if spec.kind == "encoder_decoder" else None
        at.add("lm_head.bias", spec.vocab_size, shard="vocab", compute=none)


def image_params(vision: VisionSpec) -> tuple[Param, ...]:
    """What reads images: encoder and projectors."""
    at, encoder, hidden = Declaration("vision."), vision.encoder, vision.encoder.hidden_size
    at.linear("embed_patches", hidden, encoder.num_features, bias=vision.patch_bias, quantizable=False)
    if vision.patch_norm is not None:
        at.norm(vision.patch_norm, "patch_norm", hidden)
    if vision.has_class:
        at.add("embed_class.weight", 1, hidden)
    model = Declaration(params=at.params)
    if vision.has_newline:
        model.add("projector.newline.weight", 1, vision.projector.dense[-1].out_features)
    num_places = len(vision.tile_shapes) and (len(vision.tile_shapes) + 1) * vision.max_tiles
    rows = {"tiles": num_places, "tile_patches": num_places * encoder.num_learned_positions}
    if vision.num_corners or num_places:
        parts = at.parts({f"embed_{name}.weight": count for name, count in rows.items() if count})
        count = vision.num_corners + sum(rows.values())
        at.add("embed_corners.weight", count, hidden, kind="embedding", parts=parts)
    _model(at, encoder)
    if vision.second is not None:
        _model(model.inside("second"), vision.second)
    if attn := next((layer.attn for layer in encoder.layers if layer.attn.has_padding), None):
        size = attn.num_heads * 8
        at.add("marks.weight", 2, size, kind="embedding", compute=partial(_marks, attn.num_heads))
    _projector(model.inside("projector"), vision, vision.projector, num_joined=len(vision.joined))
    for n, (_, projector) in enumerate(vision.taps):
        _projector(model.inside(f"taps.{n}"), vision, projector)
    return tuple(at.params)


def _projector(at: Declaration, vision: VisionSpec, projector: ProjectorSpec, num_joined: int = 0) -> None:
    """num_joined: see Param."""
    hidden, start = vision.encoder.hidden_size, len(at.params)
    if projector.patch_norm is not None:
        at.norm(projector.patch_norm, "patch_norm", hidden)
    if projector.norm is not None:
        at.norm(projector.norm, "norm", hidden * (1 if projector.is_mean else vision.merge**2))
    for dense in projector.dense:
        at.dense(dense)
    at.params[start:] = [replace(param, num_joined=num_joined) for param in at.params[start:]]


def _minus_factor(start: float, size: int, *vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The factor of differential attention, negative, [size]: of the products of two pairs of learned vectors."""
    q1, k1, q2, k2 = vectors
    return filled((size,), float(-(np.exp(q1 @ k1) - np.exp(q2 @ k2) + start)))


def _rows(values: tuple[int, ...], size: int) -> npt.NDArray[np.float32]:
    """[len(values), size], each row of one value."""
    return np.repeat(np.asarray(values, np.float32)[:, None], size, axis=1)


def _marks(num_heads: int) -> npt.NDArray[np.float32]:
    """What stands behind each head of a query, [2, num_heads * 8]: nothing, or what keeps padding from padding, whose
    keys have its negative. Half-precision types hold it and its square."""
    marks = np.zeros((2, num_heads, 8), np.float32)
    marks[1, :, 0] = 128.0
    return marks.reshape(2, -1)


def _relative_bias(at: Declaration, spec: ModelSpec) -> None:
    at.add("relative_bias.weight", spec.num_relative_buckets, spec.layers[0].attn.num_heads)


def _cross(at: Declaration, cross: CrossSpec, hidden_size: int) -> None:
    size, kv_size = cross.num_heads * cross.head_dim, cross.num_kv_heads * cross.head_dim
    at.linear("q_proj", size, hidden_size, "column", cross.bias)
    rows = {"k_proj": kv_size, "v_proj": kv_size}
    at.fused("kv_proj", rows, hidden_size, cross.bias, num_groups=cross.num_kv_heads)
    at.linear("o_proj", hidden_size, size, "row", cross.bias)
    for name in ("q_norm", "k_norm") if cross.qk_norm is not None else ():
        at.add(f"{name}.weight", cross.head_dim)
    for name in ("gate", "mlp_gate") if cross.gated else ():
        at.add(name, hidden_size)


def _layer(at: Declaration, layer: LayerSpec, layer_idx: int, spec: ModelSpec) -> None:
    hidden, norm, norms_output = spec.hidden_size, spec.norm, layer.post_norm or layer.norm_after_add
    if layer.has_attention or layer.mixer is not None:
        if layer.pre_norm and layer.attn_pre_norm:
            at.norm(norm, "attn_norm", hidden)
        if layer.shared is not None:
            _shared(at, layer.shared, layer.attn, layer_idx, hidden, norm)
        elif layer.has_attention:
            _attention(at.inside("attn"), layer.attn, hidden, hidden)
        if layer.mixer is not None:
            declare_mixer(at.inside("mixer"), layer.mixer, hidden)
            if layer.mixer.mlp_size:
                at.norm(norm, "mlp_norm", hidden)
                declare_channel_mix(at.inside("mlp"), layer.mixer, hidden)
        if spec.relative_bias_by_layer:
            _relative_bias(at.inside("attn"), spec)
        if norms_output:
            at.norm(norm, "attn_post_norm", hidden)
    if layer.cross is not None:
        if layer.pre_norm:
            at.norm(norm, "cross_norm", hidden)
        _cross(at.inside("cross"), layer.cross, hidden)
        if norms_output:
            at.norm(norm, "cross_post_norm", hidden)
    if not layer.has_feed_forward:
        return
    if layer.pre_norm and not layer.shared_norm:
        at.norm(norm, "mlp_norm", hidden)
    has_both = layer.moe_beside or layer.moe_ahead
    if layer.moe is None or has_both:
        _mlp(at.inside("mlp"), layer.mlp, hidden)
    if layer.moe is not None:
        _moe(at.inside("moe" if has_both else "mlp"), layer.moe, hidden)
    if layer.moe_beside:
        for name in ("mlp_out_norm", "moe.router_norm", "moe_norm", "moe_out_norm"):
            at.norm(norm, name, hidden)
    if norms_output:
        at.norm(norm, "mlp_post_norm", hidden)
    if size := spec.layer_input_size:
        at.linear("input_gate", size, hidden)
        at.linear("input_proj", hidden, size)
        at.norm(norm, "input_norm", hidden)
    if spec.altup is not None:
        _altup(at.inside("altup"), spec.altup, hidden, norm)
    if rank := layer.laurel_rank:
        at.linear("laurel.in_proj", rank, hidden)
        at.linear("laurel.out_proj", hidden, rank)
        at.norm(norm, "laurel.norm", hidden)
    if layer.has_scalar:
        at.add("scalar", hidden)


def _altup(at: Declaration, altup: AltUpSpec, hidden_size: int, norm: NormSpec) -> None:
    """What mixes the streams: small, and all else depends on it."""
    num = altup.num_streams
    at.norm(norm, "router_norm", hidden_size)
    at.linear("router", num, hidden_size, quantizable=False)
    at.linear("predict", num * num, num, quantizable=False)
    at.linear("correct", num, num, quantizable=False)
    at.add("scale", hidden_size)


def _attention(at: Declaration, attn: AttentionSpec, hidden_size: int, out_size: int) -> None:
    """hidden_size: of the input, out_size: of the output."""
    if attn.latent is not None:
        _latent_attention(at, attn, attn.latent, hidden_size)
        return
    num_heads, num_kv_heads = attn.num_own_heads, attn.num_own_kv_heads
    query_rows, kv_rows = num_heads * attn.head_dim, num_kv_heads * attn.head_dim
    out_rows, value_rows = (heads * (attn.v_head_dim or attn.head_dim) for heads in (num_heads, num_kv_heads))
    rows = {"q_proj": query_rows * (2 if attn.gate_in_query else 1)}
    if attn.kv_layer < 0:
        rows |= {"k_proj": kv_rows} if attn.value_is_key else {"k_proj": kv_rows, "v_proj": value_rows}
    at.fused("qkv_proj", rows, hidden_size, attn.qkv_bias, num_groups=num_kv_heads)
    if attn.qk_norm is not None:
        _heads_norm(at, attn, attn.qk_norm, "q_norm", num_heads)
        if attn.kv_layer < 0:
            _heads_norm(at, attn, attn.qk_norm, "k_norm", num_kv_heads)
    if attn.alibi_max_bias:
        at.constant("alibi_slopes", attn.num_heads, compute=lambda: alibi_slopes(attn), shard="column")
    if attn.sinks:
        at.add("sinks", attn.num_heads, shard="column")
    if attn.difference:
        parts = at.parts({f"lambda_{name}": attn.head_dim for name in ("q1", "k1", "q2", "k2")})
        combine = partial(_minus_factor, attn.difference, out_rows // 2)
        at.add("difference", out_rows // 2, parts=parts, combine=combine)
    if attn.gated:
        at.linear("gate_proj", attn.num_heads if attn.gate_by_head else out_rows, hidden_size, "column")
    if attn.out_norm is not None:
        at.norm(attn.out_norm, "out_norm", out_rows)
    at.linear("o_proj", out_size, out_rows, "row", attn.o_bias)


def _heads_norm(at: Declaration, attn: AttentionSpec, norm: NormSpec, name: str, num_heads: int) -> None:
    if attn.qk_norm_over == "heads":
        heads = at.parts({f"{name}.{head}.weight": attn.head_dim for head in range(num_heads)})
        size = num_heads * attn.head_dim
        at.add(f"{name}.weight", size, parts=heads, shard="column", num_stacked=num_heads, plus_one=norm.plus_one)
    else:
        at.norm(norm, name, attn.head_dim if attn.qk_norm_over == "head" else num_heads * attn.head_dim)


def _latent_attention(at: Declaration, attn: AttentionSpec, latent: LatentSpec, hidden_size: int) -> None:
    query_rows = attn.num_heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
    if rank := latent.q_lora_rank:
        at.linear("q_a_proj", rank, hidden_size, bias=latent.bias)
        at.norm(latent.norm, "q_a_norm", rank)
        at.linear("q_b_proj", query_rows, rank, "column")
    else:
        at.linear("q_proj", query_rows, hidden_size, "column")
    at.linear("kv_a_proj", attn.head_dim, hidden_size, bias=latent.bias)
    at.norm(latent.norm, "kv_a_norm", latent.kv_lora_rank)
    num, kv_rows = attn.num_heads, attn.num_heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    at.add("kv_b_proj.weight", kv_rows, latent.kv_lora_rank, kind="stacked", shard="column", num_stacked=num)
    at.linear("o_proj", hidden_size, attn.num_heads * latent.v_head_dim, "row", attn.o_bias)


def _shared(
    layer: Declaration, shared: SharedSpec, attn: AttentionSpec, layer_idx: int, hidden_size: int, norm: NormSpec
) -> None:
    """What is the layer's own, and the block itself with the layer that keeps it."""
    at, size = Declaration(f"layers.{shared.owner}.shared.", layer.params), shared.mlp.intermediate_size
    if layer_idx == shared.owner:
        at.norm(norm, "attn_norm", 2 * hidden_size)
        _attention(at.inside("attn"), attn, 2 * hidden_size, hidden_size)
        at.norm(norm, "mlp_norm", hidden_size)
        _mlp(at.inside("mlp"), shared.mlp, hidden_size)
    query, keys = attn.num_heads * attn.head_dim, attn.num_kv_heads * attn.head_dim
    adapters = [("mlp.adapter", hidden_size, 2 * size)]
    if shared.has_attn_adapter:
        outs = (query, keys, keys)
        adapters += [(f"attn.{name}_adapter", 2 * hidden_size, out) for name, out in zip("qkv", outs, strict=True)]
    for name, in_features, out in adapters:
        at.linear(f"{name}_in.{shared.number}", shared.adapter_rank, in_features)
        at.linear(f"{name}_out.{shared.number}", out, shared.adapter_rank)
    layer.linear("shared.out_proj", hidden_size, hidden_size)


def _mlp(at: Declaration, mlp: MlpSpec, hidden_size: int) -> None:
    size = mlp.intermediate_size
    if mlp.gated:
        at.fused("gate_up_proj", {"gate_proj": size, "up_proj": size}, hidden_size, mlp.bias, num_groups=size)
    else:
        at.linear("up_proj", size, hidden_size, "column", mlp.bias)
    if mlp.sparsity:
        at.constant("cut", size, compute=partial(filled, (size,), -NormalDist().inv_cdf(mlp.sparsity)))
    if mlp.xielu:
        for name, alpha in zip("pn", mlp.xielu_alphas or (None, None), strict=True):
            at.add(f"act.alpha_{name}", 1, compute=None if alpha is None else partial(filled, (1,), alpha))
    if mlp.inner_norm is not None:
        at.norm(mlp.inner_norm, "inner_norm", size)
    at.linear("down_proj", hidden_size, size, "row", mlp.bias)


def _moe(at: Declaration, moe: MoeSpec, hidden_size: int) -> None:
    num_scores = moe.num_experts + moe.num_identities
    # A wrong expert is worse than a wrong digit, and these are small.
    at.linear("router", num_scores, hidden_size, bias=moe.router_bias, quantizable=False)
    if moe.has_correction:
        zeros = partial(filled, (num_scores,), 0.0) if moe.may_lack_correction else None
        at.add("router.correction", num_scores, compute=zeros)
    size, expert_size = moe.intermediate_size, moe.latent_size or hidden_size
    if moe.gated:
        _experts(at, moe, "gate_up_proj", ("gate_proj", "up_proj"), size, expert_size)
    else:
        _experts(at, moe, "up_proj", ("up_proj",), size, expert_size)
    _experts(at, moe, "down_proj", ("down_proj",), expert_size, size)
    if moe.latent_size:
        at.linear("latent_in", moe.latent_size, hidden_size)
        at.linear("latent_out", hidden_size, moe.latent_size)
    if moe.shared is not None:
        _mlp(at.inside("shared"), moe.shared, hidden_size)
    if moe.out_norm is not None:
        at.norm(moe.out_norm, "out_norm", hidden_size)
    if moe.shared_gated:
        at.linear("shared_gate", 1, hidden_size, quantizable=False)


def _experts(at: Declaration, moe: MoeSpec, name: str, pieces: tuple[str, ...], rows: int, columns: int) -> None:
    """One projection of all experts. pieces: what it is made of, `rows` each."""
    num, out = moe.num_experts, moe.num_experts * len(pieces) * rows
    shapes = {"weight": (out, columns), "bias": (out,)}
    for leaf in ("weight", "bias") if moe.bias else ("weight",):
        is_weight = leaf == "weight"
        at.add(
            f"experts.{name}.{leaf}",
            *shapes[leaf],
            kind="stacked" if is_weight else "vector",
            shard="expert",
            parts=at.parts({f"experts.{j}.{piece}.{leaf}": rows for j in range(num) for piece in pieces}),
            num_groups=rows,
            num_stacked=num,
            quantizable=is_weight,
        )
