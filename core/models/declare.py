"""The parameters of a spec, in the order in which a forward pass reads them."""

import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from . import leaves
from .mixer_params import channel_mix_params, mixer_params
from .params import Param, Part
from .spec import (
    AltUpSpec,
    AttentionSpec,
    CrossSpec,
    DenseSpec,
    LatentSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    PoolerSpec,
    RopeSpec,
    SharedSpec,
)
from .vision_spec import ProjectorSpec, VisionSpec


def declare_params(spec: ModelSpec) -> tuple[Param, ...]:
    """Every parameter of a model. A tied model has no lm_head.weight: embed_tokens.weight serves as both."""
    if spec.foreign is not None:
        return spec.foreign.params
    params = tuple(_encoder(spec) if spec.kind == "encoder" else _decoder(spec))
    if spec.encoder is not None:
        params += tuple(_prefixed(param, "encoder.") for param in _encoder(spec.encoder))
    if spec.vision is not None:
        params += image_params(spec.vision)
    return params


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


def _decoder(spec: ModelSpec) -> Iterator[Param]:
    hidden = spec.hidden_size
    embed_size = spec.embed_size or hidden
    yield leaves.token_table("embed_tokens.weight", spec.vocab_size + spec.num_extra_tokens, embed_size)
    if spec.embed_size:
        yield from leaves.linear("project_in", hidden, embed_size, "replicated", False)
    yield from _positions(spec, hidden)
    if spec.embed_norm:
        yield from leaves.norm(spec.norm, "embed_norm", hidden)
    if size := spec.layer_input_size * spec.num_layers:
        yield leaves.token_table("embed_layers.weight", spec.vocab_size, size)
        yield from leaves.linear("embed_layers_proj", size, hidden, "replicated", False)
        yield from leaves.norm(spec.norm, "embed_layers_norm", spec.layer_input_size)
    for way in ("in", "out") if spec.altup is not None else ():
        for n in range(1, spec.altup.num_streams if spec.altup is not None else 0):
            yield from leaves.linear(f"altup_{way}.{n - 1}", hidden, hidden, "replicated", False)
    if spec.num_relative_buckets and not spec.relative_bias_by_layer:
        yield _relative_bias(spec, "")
    for n, rope in enumerate(distinct_ropes(spec)):
        yield from leaves.rope(rope, f"rope.{n}")
    if spec.vision is not None and spec.vision.is_crossed:
        for name, opened in (("cross", (0, 1, 1)), ("mlp", (0, 0, 1))):
            rows = partial(_rows, opened, hidden)
            yield Param(name=f"sees.{name}.weight", shape=(3, hidden), kind="embedding", compute=rows)
    for i, layer in enumerate(spec.layers):
        yield from _layer(layer, f"layers.{i}", spec)
    if spec.final_norm:
        yield from leaves.norm(spec.norm, "final_norm", hidden)
    if spec.pooler is not None:  # then there is no head for tokens
        yield from _head(spec.pooler)
        return
    if spec.embed_size:
        yield from leaves.linear("project_out", embed_size, hidden, "replicated", False)
    if spec.head_transform is not None:
        yield from _dense(spec.head_transform)
    if not spec.tie_word_embeddings:
        yield dataclasses.replace(
            leaves.token_table("lm_head.weight", spec.vocab_size, embed_size), unit_rows=spec.lm_head_unit_rows
        )
    if spec.lm_head_bias:
        shape = (spec.vocab_size,)
        none = partial(leaves.filled, shape, 0.0) if spec.kind == "encoder_decoder" else None
        yield Param(name="lm_head.bias", shape=shape, kind="vector", shard="vocab", compute=none)


def _encoder(spec: ModelSpec) -> Iterator[Param]:
    hidden = spec.hidden_size
    size = spec.embed_size or hidden
    num_inputs = spec.num_features
    for n, convolution in enumerate(spec.convolutions):
        size_in = convolution.kernel * num_inputs
        yield from leaves.linear(f"convolutions.{n}", hidden, size_in, "replicated", True, quantizable=False)
        num_inputs = hidden
    if not spec.num_features and not spec.shares_embedding:
        yield leaves.token_table("embed_tokens.weight", spec.vocab_size, size)
    if spec.num_token_types:
        yield Param(name="embed_token_types.weight", shape=(spec.num_token_types, size), kind="embedding")
    yield from _positions(spec, size)
    if spec.embed_norm:
        yield from leaves.norm(spec.norm, "embed_norm", size)
    if spec.num_relative_buckets and not spec.relative_bias_by_layer:
        yield _relative_bias(spec, "")
    if spec.embed_size:
        yield from leaves.linear("embed_in", hidden, size, "replicated", True)
    for n, rope in enumerate(distinct_ropes(spec)):
        yield from leaves.rope(rope, f"rope.{n}")
    for i, layer in enumerate(spec.layers):
        yield from _layer(layer, f"layers.{i}", spec)
    if spec.final_norm:
        yield from leaves.norm(spec.norm, "final_norm", hidden)
    if spec.pooler is not None:
        yield from _head(spec.pooler)


def image_params(vision: VisionSpec) -> tuple[Param, ...]:
    """What reads images: encoder and projectors."""
    return tuple(_vision(vision))


def _vision(vision: VisionSpec) -> Iterator[Param]:
    encoder = vision.encoder
    hidden = encoder.hidden_size
    yield from leaves.linear(
        "vision.embed_patches", hidden, encoder.num_features, "replicated", vision.patch_bias, quantizable=False
    )
    if vision.patch_norm is not None:
        yield from leaves.norm(vision.patch_norm, "vision.patch_norm", hidden)
    if vision.has_class:
        yield Param(name="vision.embed_class.weight", shape=(1, hidden), kind="vector")
    if vision.has_newline:
        rows = vision.projector.dense[-1].out_features
        yield Param(name="projector.newline.weight", shape=(1, rows), kind="vector")
    num_places = len(vision.tile_shapes) and (len(vision.tile_shapes) + 1) * vision.max_tiles
    parts = {"tiles": num_places, "tile_patches": num_places * encoder.num_learned_positions}
    if vision.num_corners or num_places:
        yield Param(
            name="vision.embed_corners.weight",
            shape=(vision.num_corners + sum(parts.values()), hidden),
            kind="embedding",
            parts=tuple(Part(name=f"vision.embed_{name}.weight", rows=n) for name, n in parts.items() if n),
        )
    yield from (_prefixed(param, "vision.") for param in _encoder(encoder))
    if vision.second is not None:
        yield from (_prefixed(param, "second.") for param in _encoder(vision.second))
    if attn := next((layer.attn for layer in encoder.layers if layer.attn.has_padding), None):
        marks = partial(_marks, attn.num_heads)
        yield Param(name="vision.marks.weight", shape=(2, attn.num_heads * 8), kind="embedding", compute=marks)
    for param in _projector(vision, vision.projector, "projector"):
        yield dataclasses.replace(param, num_joined=len(vision.joined))
    for n, (_, projector) in enumerate(vision.taps):
        yield from _projector(vision, projector, f"taps.{n}")


def _projector(vision: VisionSpec, projector: ProjectorSpec, prefix: str) -> Iterator[Param]:
    hidden = vision.encoder.hidden_size
    if projector.patch_norm is not None:
        yield from leaves.norm(projector.patch_norm, f"{prefix}.patch_norm", hidden)
    if projector.norm is not None:
        yield from leaves.norm(
            projector.norm, f"{prefix}.norm", hidden * (1 if projector.is_mean else vision.merge**2)
        )
    for dense in projector.dense:
        yield from _dense(dense, f"{prefix}.")


def _dense(dense: DenseSpec, prefix: str = "") -> Iterator[Param]:
    name, rows, cols = f"{prefix}{dense.name}", dense.out_features, dense.in_features
    if dense.gated:
        halves = {"gate_proj": rows, "up_proj": rows}
        for param in leaves.fused(f"{name}.gate_up_proj", name, halves, cols, dense.bias, 1):
            yield dataclasses.replace(param, shard="replicated", quantizable=False)
    else:
        yield from leaves.linear(name, rows, cols, "replicated", dense.bias, quantizable=False)
    if dense.norm is not None:
        yield from leaves.norm(dense.norm, f"{name}_norm", rows)


def _minus_factor(start: float, size: int, *vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The factor of differential attention, negative, [size]: of the products of two pairs of learned vectors."""
    q1, k1, q2, k2 = vectors
    return leaves.filled((size,), -(np.exp(q1 @ k1) - np.exp(q2 @ k2) + start))


def _rows(values: tuple[int, ...], size: int) -> npt.NDArray[np.float32]:
    """[len(values), size], each row of one value."""
    return np.repeat(np.asarray(values, np.float32)[:, None], size, axis=1)


def _marks(num_heads: int) -> npt.NDArray[np.float32]:
    """What stands behind each head of a query, [2, num_heads * 8]: nothing, or what keeps padding from padding, whose
    keys have its negative. Half-precision types hold it and its square."""
    marks = np.zeros((2, num_heads, 8), np.float32)
    marks[1, :, 0] = 128.0
    return marks.reshape(2, -1)


def _prefixed(param: Param, prefix: str) -> Param:
    parts = tuple(dataclasses.replace(part, name=prefix + part.name) for part in param.parts)
    return dataclasses.replace(param, name=prefix + param.name, parts=parts)


def _positions(spec: ModelSpec, size: int) -> Iterator[Param]:
    if spec.num_learned_positions:
        shape = (spec.num_learned_positions, size)
        table = partial(sinusoids, spec, size) if spec.sinusoids else None
        yield Param(name="embed_positions.weight", shape=shape, kind="embedding", compute=table)


def _relative_bias(spec: ModelSpec, prefix: str) -> Param:
    shape = (spec.num_relative_buckets, spec.layers[0].attn.num_heads)
    return Param(name=f"{prefix}relative_bias.weight", shape=shape, kind="vector")


def _cross(cross: CrossSpec, prefix: str, hidden_size: int) -> Iterator[Param]:
    size, kv_size = cross.num_heads * cross.head_dim, cross.num_kv_heads * cross.head_dim
    yield from leaves.linear(f"{prefix}.q_proj", size, hidden_size, "column", cross.bias)
    rows = {"k_proj": kv_size, "v_proj": kv_size}
    yield from leaves.fused(f"{prefix}.kv_proj", prefix, rows, hidden_size, cross.bias, cross.num_kv_heads)
    yield from leaves.linear(f"{prefix}.o_proj", hidden_size, size, "row", cross.bias)
    for name in ("q_norm", "k_norm") if cross.qk_norm is not None else ():
        yield Param(name=f"{prefix}.{name}.weight", shape=(cross.head_dim,), kind="vector")
    for name in ("gate", "mlp_gate") if cross.gated else ():
        yield Param(name=f"{prefix}.{name}", shape=(hidden_size,), kind="vector")


def _head(pooler: PoolerSpec) -> Iterator[Param]:
    for dense in pooler.dense:
        yield from _dense(dense)


def _layer(layer: LayerSpec, prefix: str, spec: ModelSpec) -> Iterator[Param]:
    hidden, norms_output = spec.hidden_size, layer.post_norm or layer.norm_after_add
    if layer.has_attention or layer.mixer is not None:
        if layer.pre_norm and layer.attn_pre_norm:
            yield from leaves.norm(spec.norm, f"{prefix}.attn_norm", hidden)
        if layer.attn.latent is not None:
            yield from _latent_attention(layer.attn, layer.attn.latent, f"{prefix}.attn", hidden)
        elif layer.shared is not None:
            yield from _shared(layer.shared, layer.attn, prefix, hidden, spec.norm)
        elif layer.has_attention:
            yield from _attention(layer.attn, f"{prefix}.attn", hidden)
        if layer.mixer is not None:
            yield from mixer_params(layer.mixer, f"{prefix}.mixer", hidden)
            if layer.mixer.mlp_size:
                yield from leaves.norm(spec.norm, f"{prefix}.mlp_norm", hidden)
                yield from channel_mix_params(layer.mixer, f"{prefix}.mlp", hidden)
        if spec.relative_bias_by_layer:
            yield _relative_bias(spec, f"{prefix}.attn.")
        if norms_output:
            yield from leaves.norm(spec.norm, f"{prefix}.attn_post_norm", hidden)
    if layer.cross is not None:
        if layer.pre_norm:
            yield from leaves.norm(spec.norm, f"{prefix}.cross_norm", hidden)
        yield from _cross(layer.cross, f"{prefix}.cross", hidden)
        if norms_output:
            yield from leaves.norm(spec.norm, f"{prefix}.cross_post_norm", hidden)
    if not layer.has_feed_forward:
        return
    if layer.pre_norm and not layer.shared_norm:
        yield from leaves.norm(spec.norm, f"{prefix}.mlp_norm", hidden)
    has_both = layer.moe_beside or layer.moe_ahead
    if layer.moe is None or has_both:
        yield from _mlp(layer.mlp, f"{prefix}.mlp", hidden)
    if layer.moe is not None:
        yield from _moe(layer.moe, f"{prefix}.{'moe' if has_both else 'mlp'}", hidden)
    if layer.moe_beside:
        for name in ("mlp_out_norm", "moe.router_norm", "moe_norm", "moe_out_norm"):
            yield from leaves.norm(spec.norm, f"{prefix}.{name}", hidden)
    if norms_output:
        yield from leaves.norm(spec.norm, f"{prefix}.mlp_post_norm", hidden)
    if size := spec.layer_input_size:
        yield from leaves.linear(f"{prefix}.input_gate", size, hidden, "replicated", False)
        yield from leaves.linear(f"{prefix}.input_proj", hidden, size, "replicated", False)
        yield from leaves.norm(spec.norm, f"{prefix}.input_norm", hidden)
    if spec.altup is not None:
        yield from _altup(spec.altup, f"{prefix}.altup", hidden, spec.norm)
    if rank := layer.laurel_rank:
        yield from leaves.linear(f"{prefix}.laurel.in_proj", rank, hidden, "replicated", False)
        yield from leaves.linear(f"{prefix}.laurel.out_proj", hidden, rank, "replicated", False)
        yield from leaves.norm(spec.norm, f"{prefix}.laurel.norm", hidden)
    if layer.has_scalar:
        yield Param(name=f"{prefix}.scalar", shape=(hidden,), kind="vector")


def _altup(altup: AltUpSpec, prefix: str, hidden_size: int, norm: NormSpec) -> Iterator[Param]:
    """What mixes the streams: small, and all else depends on it."""
    num = altup.num_streams
    yield from leaves.norm(norm, f"{prefix}.router_norm", hidden_size)
    for name, rows, columns in (("router", num, hidden_size), ("predict", num * num, num), ("correct", num, num)):
        yield from leaves.linear(f"{prefix}.{name}", rows, columns, "replicated", False, quantizable=False)
    yield Param(name=f"{prefix}.scale", shape=(hidden_size,), kind="vector")


def _attention(attn: AttentionSpec, prefix: str, hidden_size: int, out_size: int = 0) -> Iterator[Param]:
    """out_size: of the output, if it is not that of the input."""
    num_heads, num_kv_heads = attn.num_own_heads, attn.num_own_kv_heads
    query_rows, kv_rows = num_heads * attn.head_dim, num_kv_heads * attn.head_dim
    out_rows, value_rows = (heads * (attn.v_head_dim or attn.head_dim) for heads in (num_heads, num_kv_heads))
    rows = {"q_proj": query_rows * (2 if attn.gate_in_query else 1)}
    if attn.kv_layer < 0:
        rows |= {"k_proj": kv_rows} if attn.value_is_key else {"k_proj": kv_rows, "v_proj": value_rows}
    yield from leaves.fused(f"{prefix}.qkv_proj", prefix, rows, hidden_size, attn.qkv_bias, num_kv_heads)
    if attn.qk_norm is not None:
        yield from _heads_norm(attn, attn.qk_norm, f"{prefix}.q_norm", num_heads)
        if attn.kv_layer < 0:
            yield from _heads_norm(attn, attn.qk_norm, f"{prefix}.k_norm", num_kv_heads)
    yield from _position_biases(attn, prefix)
    if attn.difference:
        parts = tuple(Part(name=f"{prefix}.lambda_{name}", rows=attn.head_dim) for name in ("q1", "k1", "q2", "k2"))
        combine = partial(_minus_factor, attn.difference, out_rows // 2)
        yield Param(name=f"{prefix}.difference", shape=(out_rows // 2,), kind="vector", parts=parts, combine=combine)
    if attn.gated:
        gate_rows = attn.num_heads if attn.gate_by_head else out_rows
        yield from leaves.linear(f"{prefix}.gate_proj", gate_rows, hidden_size, "column", False)
    if attn.out_norm is not None and attn.out_norm.weight:
        yield from leaves.norm(attn.out_norm, f"{prefix}.out_norm", out_rows)
    yield from leaves.linear(f"{prefix}.o_proj", out_size or hidden_size, out_rows, "row", attn.o_bias)


def _heads_norm(attn: AttentionSpec, norm: NormSpec, name: str, num_heads: int) -> Iterator[Param]:
    size = attn.head_dim if attn.qk_norm_over == "head" else num_heads * attn.head_dim
    for param in leaves.norm(norm, name, size):
        if attn.qk_norm_over != "heads":
            yield param
            continue
        leaf = param.name.removeprefix(name)
        heads = tuple(Part(name=f"{name}.{head}{leaf}", rows=attn.head_dim) for head in range(num_heads))
        yield dataclasses.replace(param, num_stacked=num_heads, parts=heads, shard="column")


def _position_biases(attn: AttentionSpec, prefix: str) -> Iterator[Param]:
    shape = (attn.num_heads,)
    if attn.alibi_max_bias:
        yield Param(
            name=f"{prefix}.alibi_slopes",
            shape=shape,
            kind="constant",
            shard="column",
            compute=lambda: alibi_slopes(attn),
        )
    if attn.sinks:
        yield Param(name=f"{prefix}.sinks", shape=shape, kind="vector", shard="column")


def _latent_attention(attn: AttentionSpec, latent: LatentSpec, prefix: str, hidden_size: int) -> Iterator[Param]:
    query_rows = attn.num_heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
    if latent.q_lora_rank:
        yield from leaves.linear(f"{prefix}.q_a_proj", latent.q_lora_rank, hidden_size, "replicated", latent.bias)
        yield from leaves.norm(latent.norm, f"{prefix}.q_a_norm", latent.q_lora_rank)
        yield from leaves.linear(f"{prefix}.q_b_proj", query_rows, latent.q_lora_rank, "column", False)
    else:
        yield from leaves.linear(f"{prefix}.q_proj", query_rows, hidden_size, "column", False)
    yield from leaves.linear(f"{prefix}.kv_a_proj", attn.head_dim, hidden_size, "replicated", latent.bias)
    yield from leaves.norm(latent.norm, f"{prefix}.kv_a_norm", latent.kv_lora_rank)
    kv_rows = attn.num_heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    yield Param(
        name=f"{prefix}.kv_b_proj.weight",
        shape=(kv_rows, latent.kv_lora_rank),
        kind="stacked",
        shard="column",
        num_stacked=attn.num_heads,
    )
    yield from leaves.linear(f"{prefix}.o_proj", hidden_size, attn.num_heads * latent.v_head_dim, "row", attn.o_bias)


def _shared(shared: SharedSpec, attn: AttentionSpec, layer: str, hidden_size: int, norm: NormSpec) -> Iterator[Param]:
    """What is the layer's own, and the block itself with the layer that keeps it."""
    prefix, size = f"layers.{shared.owner}.shared", shared.mlp.intermediate_size
    if layer == f"layers.{shared.owner}":
        yield from leaves.norm(norm, f"{prefix}.attn_norm", 2 * hidden_size)
        yield from _attention(attn, f"{prefix}.attn", 2 * hidden_size, hidden_size)
        yield from leaves.norm(norm, f"{prefix}.mlp_norm", hidden_size)
        yield from _mlp(shared.mlp, f"{prefix}.mlp", hidden_size)
    query, keys = attn.num_heads * attn.head_dim, attn.num_kv_heads * attn.head_dim
    adapters = [("mlp.adapter", hidden_size, 2 * size)]
    if shared.has_attn_adapter:
        outs = (query, keys, keys)
        adapters += [(f"attn.{name}_adapter", 2 * hidden_size, out) for name, out in zip("qkv", outs, strict=True)]
    for name, in_features, out in adapters:
        rank, number = shared.adapter_rank, shared.number
        yield from leaves.linear(f"{prefix}.{name}_in.{number}", rank, in_features, "replicated", False)
        yield from leaves.linear(f"{prefix}.{name}_out.{number}", out, rank, "replicated", False)
    yield from leaves.linear(f"{layer}.shared.out_proj", hidden_size, hidden_size, "replicated", False)


def _mlp(mlp: MlpSpec, prefix: str, hidden_size: int) -> Iterator[Param]:
    size = mlp.intermediate_size
    if mlp.gated:
        rows = {"gate_proj": size, "up_proj": size}
        yield from leaves.fused(f"{prefix}.gate_up_proj", prefix, rows, hidden_size, mlp.bias, size)
    else:
        yield from leaves.linear(f"{prefix}.up_proj", size, hidden_size, "column", mlp.bias)
    if mlp.sparsity:
        cut = partial(leaves.filled, (size,), -NormalDist().inv_cdf(mlp.sparsity))
        yield Param(name=f"{prefix}.cut", shape=(size,), kind="constant", compute=cut)
    if mlp.xielu:
        for name, alpha in zip("pn", mlp.xielu_alphas or (None, None), strict=True):
            known = None if alpha is None else partial(leaves.filled, (1,), alpha)
            yield Param(name=f"{prefix}.act.alpha_{name}", shape=(1,), kind="vector", compute=known)
    if mlp.inner_norm is not None:
        yield from leaves.norm(mlp.inner_norm, f"{prefix}.inner_norm", size)
    yield from leaves.linear(f"{prefix}.down_proj", hidden_size, size, "row", mlp.bias)


def _moe(moe: MoeSpec, prefix: str, hidden_size: int) -> Iterator[Param]:
    num_experts, size = moe.num_experts, moe.intermediate_size
    num_scores = num_experts + moe.num_identities
    # A wrong expert is worse than a wrong digit, and these are small.
    yield from leaves.linear(
        f"{prefix}.router", num_scores, hidden_size, "replicated", moe.router_bias, quantizable=False
    )
    if moe.has_correction:
        zeros = partial(leaves.filled, (num_scores,), 0.0) if moe.may_lack_correction else None
        yield Param(name=f"{prefix}.router.correction", shape=(num_scores,), kind="vector", compute=zeros)
    expert_size = moe.latent_size or hidden_size
    up = ("gate_up_proj", ("gate_proj", "up_proj")) if moe.gated else ("up_proj", ("up_proj",))
    for name, pieces, rows, columns in ((*up, size, expert_size), ("down_proj", ("down_proj",), expert_size, size)):
        for leaf in ("weight", "bias") if moe.bias else ("weight",):
            parts = tuple(
                Part(name=f"{prefix}.experts.{expert}.{piece}.{leaf}", rows=rows)
                for expert in range(num_experts)
                for piece in pieces
            )
            out = num_experts * len(pieces) * rows
            yield Param(
                name=f"{prefix}.experts.{name}.{leaf}",
                shape=(out, columns) if leaf == "weight" else (out,),
                kind="stacked" if leaf == "weight" else "vector",
                shard="expert",
                parts=parts,
                num_groups=rows,
                num_stacked=num_experts,
                quantizable=leaf == "weight",
            )
    if moe.latent_size:
        yield from leaves.linear(f"{prefix}.latent_in", moe.latent_size, hidden_size, "replicated", False)
        yield from leaves.linear(f"{prefix}.latent_out", hidden_size, moe.latent_size, "replicated", False)
    if moe.shared is not None:
        yield from _mlp(moe.shared, f"{prefix}.shared", hidden_size)
    if moe.out_norm is not None:
        yield from leaves.norm(moe.out_norm, f"{prefix}.out_norm", hidden_size)
    if moe.shared_gated:
        yield from leaves.linear(f"{prefix}.shared_gate", 1, hidden_size, "replicated", False, quantizable=False)
