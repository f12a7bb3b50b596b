"""Attention of one layer inside a forward function: plain, with latent keys and values, to an encoder's output."""

from functools import partial

from ..stages import Array
from .constants import minus_factor
from .memory import Kept, Sight
from .scope import Scope
from .spec import AttentionSpec, LatentSpec


def attention(
    at: Scope, attn: AttentionSpec, x: Array, sight: Sight, *, in_size: int = 0, adapted: Array | None = None
) -> Array:
    """Self-attention of x: [num_tokens, hidden_size]; returns that shape. in_size: of x, if it has another one.
    adapted: what an adapter adds to query, key and value."""
    ops, head_dim, in_size = at.ops, attn.head_dim, in_size or at.hidden_size
    x = at.scaled(x, attn.in_scale)
    if attn.latent is not None:
        return _latent_attention(at, attn, attn.latent, x, sight)
    value_dim, kv_size = attn.v_head_dim or head_dim, attn.num_own_kv_heads * attn.qk_dim
    rows = {"q_proj": attn.num_own_heads * attn.qk_dim * (2 if attn.gate_in_query else 1)}
    if attn.kv_layer < 0:
        rows |= {"k_proj": kv_size} | ({} if attn.value_is_key else {"v_proj": attn.num_own_kv_heads * value_dim})
    qkv = at.fused("qkv_proj", x, rows, in_size, attn.qkv_bias, num_groups=attn.num_own_kv_heads)
    if adapted is not None:
        qkv = ops.add(qkv, adapted)
    query, *own = ops.split(qkv, tuple(rows.values()))  # and key, value
    if attn.gate_in_query:
        query, gate = ops.split(ops.split_heads(query, head_dim=2 * head_dim), (head_dim, head_dim))
        query, gate = ops.merge_heads(query), ops.merge_heads(gate)
    if attn.difference:
        query, own = _twice(at, kv_size, query, *own)
    kept: Kept = None
    query = _prepare(at, attn, "q_norm", attn.num_own_heads, query, sight)
    if attn.kv_layer < 0:
        key = _prepare(at, attn, "k_norm", attn.num_own_kv_heads, own[0], sight)
        kept = (key, _prepare_value(at, attn, own))
    out = sight.attend(at, attn, query, kept)
    out_size = attn.num_own_heads * value_dim
    if attn.v_head_dim:
        out, _ = ops.split(out, (attn.v_head_dim, head_dim - attn.v_head_dim))
    if attn.difference:
        out = _difference(at, attn, out)
    elif not attn.gate_by_head:
        out = ops.merge_heads(out)
    if attn.gated:
        gate_size = attn.num_heads if attn.gate_by_head else out_size
        gate = at.linear("gate_proj", x, gate_size, in_size, "column")
    if attn.gate_activation == "sigmoid" and (attn.gated or attn.gate_in_query):
        out = ops.gate(out, gate)
    elif attn.gated:
        out = ops.mul(out, ops.act(gate, activation=attn.gate_activation))
    if attn.gate_by_head:
        out = ops.merge_heads(out)
    if attn.out_norm is not None and not attn.difference:
        out = at.normalize(attn.out_norm, "out_norm", out, out_size)
    return at.scaled(at.linear("o_proj", out, at.hidden_size, out_size, "row", attn.o_bias), attn.out_scale)


def cross_attention(at: Scope, cross: AttentionSpec, x: Array, sight: Sight) -> Array:
    """Attention of x: [num_tokens, hidden_size] to what an encoder made of the other input; returns that shape."""
    size = cross.num_heads * cross.head_dim
    query = at.linear("q_proj", x, size, at.hidden_size, "column", cross.qkv_bias)
    query = at.ops.split_heads(query, head_dim=cross.head_dim)
    if cross.qk_norm is not None:
        query = at.normalize(cross.qk_norm, "q_norm", query, cross.head_dim)
    out = sight.caches.attend_encoder(at, cross, sight.layer_idx, query)
    return at.linear("o_proj", at.ops.merge_heads(out), at.hidden_size, size, "row", cross.o_bias)


def cross_keys(at: Scope, cross: AttentionSpec, x: Array) -> tuple[Array, Array]:
    """Keys and values that such a layer has of the encoder's output x, each [num_tokens, num_kv_heads, head_dim]."""
    size = cross.num_kv_heads * cross.head_dim
    rows = {"k_proj": size, "v_proj": size}
    both = at.fused("kv_proj", x, rows, at.hidden_size, cross.qkv_bias, num_groups=cross.num_kv_heads)
    key, value = (at.ops.split_heads(part, head_dim=cross.head_dim) for part in at.ops.split(both, (size, size)))
    return (key if cross.qk_norm is None else at.normalize(cross.qk_norm, "k_norm", key, cross.head_dim)), value


def _twice(at: Scope, kv_size: int, query: Array, key: Array, value: Array) -> tuple[Array, list[Array]]:
    """Rows of heads for differential attention: query, and key and value. All heads meet first the values of the
    first half of KV heads, then those of the second half."""
    ops = at.ops
    first, second = ops.split(value, (kv_size // 2, kv_size // 2))
    values = ops.concat((first, first, second, second))
    return ops.concat((query, query)), [ops.concat((key, key)), values]


def _difference(at: Scope, attn: AttentionSpec, out: Array) -> Array:
    """What `_twice` made of heads, [num_tokens, num_heads, head_dim], as their differences, each over both halves of
    values, normalised and scaled: [num_tokens, num_heads / 2 * head_dim]."""
    assert attn.out_norm is not None
    ops, quarter = at.ops, attn.num_heads * attn.head_dim // 4
    parts = {f"lambda_{name}": attn.head_dim for name in ("q1", "k1", "q2", "k2")}
    combine = partial(minus_factor, attn.difference, quarter)
    factor = at.param("difference", quarter, parts=parts, combine=combine)
    a, b, c, d = ops.split(ops.merge_heads(out), (quarter,) * 4)
    first = ops.split_heads(ops.add(a, ops.mul(b, factor)), head_dim=attn.head_dim)
    second = ops.split_heads(ops.add(c, ops.mul(d, factor)), head_dim=attn.head_dim)
    pairs = ops.rms_norm(ops.concat((first, second)), None, eps=attn.out_norm.eps)
    return ops.scale(ops.merge_heads(pairs), 1 - attn.difference)


def _prepare(at: Scope, attn: AttentionSpec, norm: str, num_heads: int, x: Array, sight: Sight) -> Array:
    """Heads of a query or of keys, normalised, cut and turned in the order of the family."""
    ops = at.ops
    if attn.norm_after_rope:
        x = ops.split_heads(x, head_dim=attn.qk_dim)
    else:
        x = _norm_heads(at, attn, norm, num_heads, x)
    if attn.clip_qkv:
        x = ops.clamp(x, limit=attn.clip_qkv)
    x = _turn(at, attn, x, sight)
    if attn.norm_after_rope and attn.qk_norm is not None:
        x = at.normalize(attn.qk_norm, norm, x, attn.qk_dim)
    return _widen(at, x, attn.qk_dim, attn.head_dim)


def _prepare_value(at: Scope, attn: AttentionSpec, own: list[Array]) -> Array:
    """Heads of the value, the last of what a layer has itself, the first being the key."""
    ops = at.ops
    size = attn.v_head_dim or attn.head_dim
    value = _widen(at, ops.split_heads(own[-1], head_dim=size), size, attn.head_dim)
    if attn.value_norm is not None:
        value = at.normalize(attn.value_norm, "v_norm", value, attn.head_dim)
    return ops.clamp(value, limit=attn.clip_qkv) if attn.clip_qkv else value


def _widen(at: Scope, x: Array, size: int, head_dim: int) -> Array:
    """Heads of `size` values with zeros behind them, as the cache holds them: [num_tokens, num_heads, head_dim]."""
    while size < head_dim:
        more, zeros = min(size, head_dim - size), at.ops.scale(x, 0.0)
        x = at.ops.concat((x, zeros if more == size else at.ops.split(zeros, (more, size - more))[0]))
        size += more
    return x


def _latent_attention(at: Scope, attn: AttentionSpec, latent: LatentSpec, x: Array, sight: Sight) -> Array:
    """Multi-head latent attention in its absorbed form (DeepSeek-V2, 2.1), for prefill and decode alike.

    A head's score q . (W_k c) is (W_k^T q) . c, so that queries meet the latents c themselves: attention with one
    KV head of kv_lora_rank + qk_rope_head_dim values, whose value is the latent part of its key.
    """
    ops, hidden, heads = at.ops, at.hidden_size, attn.num_heads
    rank, rope_dim, nope_dim = latent.kv_lora_rank, latent.qk_rope_head_dim, latent.qk_nope_head_dim
    query_size, value_size = heads * (nope_dim + rope_dim), heads * latent.v_head_dim
    kv_shape = (heads * nope_dim + value_size, rank)
    kv_b_proj = at.param("kv_b_proj.weight", *kv_shape, kind="stacked", shard="column", num_stacked=heads)
    if q_rank := latent.q_lora_rank:
        query = at.linear("q_a_proj", x, q_rank, hidden, bias=latent.bias)
        query = at.normalize(latent.norm, "q_a_norm", query, q_rank)
        query = at.linear("q_b_proj", query, query_size, q_rank, "column")
    else:
        query = at.linear("q_proj", x, query_size, hidden, "column")
    unturned, turned = ops.split(ops.split_heads(query, head_dim=nope_dim + rope_dim), (nope_dim, rope_dim))
    query = ops.concat((ops.absorb_keys(unturned, kv_b_proj), _turn(at, attn, turned, sight)))

    both = at.linear("kv_a_proj", x, rank + rope_dim, hidden, bias=latent.bias)
    values, key = ops.split(both, (rank, rope_dim))
    values = at.scaled(at.normalize(latent.norm, "kv_a_norm", values, rank), latent.kv_scale)
    values = ops.split_heads(values, head_dim=rank)
    key = ops.concat((values, _turn(at, attn, ops.split_heads(key, head_dim=rope_dim), sight)))
    out, _ = ops.split(sight.attend(at, attn, query, (key, key)), (rank, rope_dim))
    out = ops.merge_heads(ops.expand_values(out, kv_b_proj, v_head_dim=latent.v_head_dim))
    return at.linear("o_proj", out, hidden, value_size, "row", attn.o_bias)


def _norm_heads(at: Scope, attn: AttentionSpec, name: str, num_heads: int, x: Array) -> Array:
    """Split into heads, and normalise as the spec says: -> [num_tokens, num_heads, head_dim]."""
    ops, norm, head_dim, size = at.ops, attn.qk_norm, attn.qk_dim, num_heads * attn.qk_dim
    if norm is not None and attn.qk_norm_over == "all":
        x = at.normalize(norm, name, x, size)
    x = ops.split_heads(x, head_dim=head_dim)
    if norm is None or attn.qk_norm_over == "all":
        return x
    if attn.qk_norm_over == "head":
        return at.normalize(norm, name, x, head_dim)
    x = ops.rms_norm(x, None, eps=norm.eps) if norm.kind == "rms" else ops.layer_norm(x, None, None, eps=norm.eps)
    weight = at.param(
        f"{name}.weight",
        size,
        parts=lambda: {f"{name}.{head}.weight": head_dim for head in range(num_heads)},
        shard="column",
        num_stacked=num_heads,
        plus_one=norm.plus_one,
    )
    return ops.split_heads(ops.mul(ops.merge_heads(x), weight), head_dim=head_dim)


def _turn(at: Scope, attn: AttentionSpec, x: Array, sight: Sight) -> Array:
    """Rope, if the layer has one."""
    return x if attn.rope is None else at.ops.rope(x, sight.cos, sight.sin, interleaved=attn.rope.interleaved)
