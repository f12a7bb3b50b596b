"""Self-attention of one layer inside a forward function: plain, and with latent keys and values."""

from ..ops.table import OpTable
from ..stages import Array, ForwardBatch
from .norms import Params, normalize
from .spec import AttentionSpec, LatentSpec


def attention(
    ops: OpTable,
    attn: AttentionSpec,
    params: Params,
    prefix: str,
    x: Array,
    cos: Array | None,
    sin: Array | None,
    cache: Array,
    group: int,
    batch: ForwardBatch,
    relative_bias: Array | None = None,
    adapted: Array | None = None,
) -> tuple[Array, Array]:
    """Self-attention of x: [num_tokens, hidden_size]; returns that shape and the layer's cache.

    cos, sin: of the layer's rope. cache, group: of the layer or of the one whose keys and values it reads; by the
    KV group the batch holds tables and slots.
    relative_bias: float32 [num_buckets, num_heads], of models that have one. adapted: what an adapter adds to query,
    key and value.
    """
    if attn.in_scale != 1.0:
        x = ops.scale(x, attn.in_scale)
    if attn.latent is not None:
        return _latent_attention(ops, attn, attn.latent, params, prefix, x, cos, sin, cache, group, batch)
    head_dim = attn.head_dim
    bias = params[f"{prefix}qkv_proj.bias"] if attn.qkv_bias else None
    qkv = ops.linear(x, params[f"{prefix}qkv_proj.weight"], bias)
    if adapted is not None:
        qkv = ops.add(qkv, adapted)
    query_size, kv_size = attn.num_own_heads * head_dim, attn.num_own_kv_heads * head_dim
    query_size *= 2 if attn.gate_in_query else 1
    num_own = 0 if attn.kv_layer >= 0 else 1 if attn.value_is_key else 2
    own_sizes = (kv_size, kv_size if not attn.v_head_dim else attn.num_kv_heads * attn.v_head_dim)[:num_own]
    query, *own = ops.split(qkv, (query_size, *own_sizes))  # and key, value
    if attn.gate_in_query:
        query, gate = ops.split(ops.split_heads(query, head_dim=2 * head_dim), (head_dim, head_dim))
        query, gate = ops.merge_heads(query), ops.merge_heads(gate)
    if attn.difference:
        query, own = _twice(ops, kv_size, query, *own)
    query = _prepare(ops, attn, params, f"{prefix}q_norm.", query, cos, sin)
    if num_own:
        key = _prepare(ops, attn, params, f"{prefix}k_norm.", own[0], cos, sin)
        value = ops.split_heads(own[-1], head_dim=attn.v_head_dim or head_dim)
        if attn.v_head_dim:
            value = ops.concat((value, _zeros(ops, attn, own[0])))
        if attn.value_norm is not None:
            value = normalize(ops, attn.value_norm, params, f"{prefix}v_norm.", value)
        if attn.clip_qkv:
            value = ops.clamp(value, limit=attn.clip_qkv)
        cache = ops.write_kv(cache, key, value, batch.slot_mappings[group])
    out = _paged(ops, attn, params, prefix, query, cache, group, batch, relative_bias)
    if attn.v_head_dim:
        out, _ = ops.split(out, (attn.v_head_dim, head_dim - attn.v_head_dim))
    if attn.difference:
        out = _difference(ops, attn, params[f"{prefix}difference"], out)
    elif not attn.gate_by_head:
        out = ops.merge_heads(out)
    if attn.gated:
        gate = ops.linear(x, params[f"{prefix}gate_proj.weight"])
    if attn.gate_activation == "sigmoid" and (attn.gated or attn.gate_in_query):
        out = ops.gate(out, gate)
    elif attn.gated:
        out = ops.mul(out, ops.act(gate, activation=attn.gate_activation))
    if attn.gate_by_head:
        out = ops.merge_heads(out)
    if attn.out_norm is not None and not attn.difference:
        out = normalize(ops, attn.out_norm, params, f"{prefix}out_norm.", out)
    bias = params[f"{prefix}o_proj.bias"] if attn.o_bias else None
    out = ops.linear(out, params[f"{prefix}o_proj.weight"], bias)
    return (out if attn.out_scale == 1.0 else ops.scale(out, attn.out_scale)), cache


def _twice(ops: OpTable, kv_size: int, query: Array, key: Array, value: Array) -> tuple[Array, list[Array]]:
    """Rows of heads for differential attention: query, and key and value. All heads meet first the values of the
    first half of KV heads, then those of the second half."""
    first, second = ops.split(value, (kv_size // 2, kv_size // 2))
    values = ops.concat((first, first, second, second))
    return ops.concat((query, query)), [ops.concat((key, key)), values]


def _difference(ops: OpTable, attn: AttentionSpec, minus_factor: Array, out: Array) -> Array:
    """What `_twice` made of heads, [num_tokens, num_heads, head_dim], as their differences, each over both halves of
    values, normalised and scaled: [num_tokens, num_heads / 2 * head_dim]."""
    assert attn.out_norm is not None
    quarter = attn.num_heads * attn.head_dim // 4
    a, b, c, d = ops.split(ops.merge_heads(out), (quarter,) * 4)
    first = ops.split_heads(ops.add(a, ops.mul(b, minus_factor)), head_dim=attn.head_dim)
    second = ops.split_heads(ops.add(c, ops.mul(d, minus_factor)), head_dim=attn.head_dim)
    pairs = ops.concat((first, second))
    pairs = ops.rms_norm(pairs, None, eps=attn.out_norm.eps)
    return ops.scale(ops.merge_heads(pairs), 1 - attn.difference)


def _zeros(ops: OpTable, attn: AttentionSpec, key: Array) -> Array:
    """What a smaller head of a value lacks behind its end: [num_tokens, num_kv_heads, head_dim - v_head_dim]."""
    num_zeros = attn.head_dim - attn.v_head_dim
    some, _ = ops.split(key, (attn.num_kv_heads * num_zeros, attn.num_kv_heads * attn.v_head_dim))
    return ops.split_heads(ops.scale(some, 0.0), head_dim=num_zeros)


def _prepare(
    ops: OpTable,
    attn: AttentionSpec,
    params: Params,
    norm: str,
    x: Array,
    cos: Array | None,
    sin: Array | None,
) -> Array:
    """Heads of a query or of keys, normalised, cut and turned in the order of the family."""
    if attn.norm_after_rope:
        x = ops.split_heads(x, head_dim=attn.head_dim)
    else:
        x = split_and_normalize(ops, attn, params, norm, x)
    if attn.clip_qkv:
        x = ops.clamp(x, limit=attn.clip_qkv)
    x = _turn(ops, attn, x, cos, sin)
    if attn.norm_after_rope and attn.qk_norm is not None:
        x = normalize(ops, attn.qk_norm, params, norm, x)
    return x


def _latent_attention(
    ops: OpTable,
    attn: AttentionSpec,
    latent: LatentSpec,
    params: Params,
    prefix: str,
    x: Array,
    cos: Array | None,
    sin: Array | None,
    cache: Array,
    group: int,
    batch: ForwardBatch,
) -> tuple[Array, Array]:
    """Multi-head latent attention in its absorbed form (DeepSeek-V2, 2.1), for prefill and decode alike.

    A head's score q . (W_k c) is (W_k^T q) . c, so that queries meet the latents c themselves: attention with one
    KV head of kv_lora_rank + qk_rope_head_dim values, whose value is the latent part of its key.
    """
    rank, rope_dim, nope_dim = latent.kv_lora_rank, latent.qk_rope_head_dim, latent.qk_nope_head_dim
    if latent.q_lora_rank:
        bias = params[f"{prefix}q_a_proj.bias"] if latent.bias else None
        query = ops.linear(x, params[f"{prefix}q_a_proj.weight"], bias)
        query = normalize(ops, latent.norm, params, f"{prefix}q_a_norm.", query)
        query = ops.linear(query, params[f"{prefix}q_b_proj.weight"])
    else:
        query = ops.linear(x, params[f"{prefix}q_proj.weight"])
    unturned, turned = ops.split(ops.split_heads(query, head_dim=nope_dim + rope_dim), (nope_dim, rope_dim))
    kv_b_proj = params[f"{prefix}kv_b_proj.weight"]
    query = ops.concat((ops.absorb_keys(unturned, kv_b_proj), _turn(ops, attn, turned, cos, sin)))

    bias = params[f"{prefix}kv_a_proj.bias"] if latent.bias else None
    values, key = ops.split(ops.linear(x, params[f"{prefix}kv_a_proj.weight"], bias), (rank, rope_dim))
    values = normalize(ops, latent.norm, params, f"{prefix}kv_a_norm.", values)
    values = values if latent.kv_scale == 1.0 else ops.scale(values, latent.kv_scale)
    values = ops.split_heads(values, head_dim=rank)
    key = ops.concat((values, _turn(ops, attn, ops.split_heads(key, head_dim=rope_dim), cos, sin)))
    cache = ops.write_kv(cache, key, key, batch.slot_mappings[group])
    out, _ = ops.split(_paged(ops, attn, params, prefix, query, cache, group, batch), (rank, rope_dim))
    out = ops.merge_heads(ops.expand_values(out, kv_b_proj, v_head_dim=latent.v_head_dim))
    bias = params[f"{prefix}o_proj.bias"] if attn.o_bias else None
    return ops.linear(out, params[f"{prefix}o_proj.weight"], bias), cache


def _paged(
    ops: OpTable,
    attn: AttentionSpec,
    params: Params,
    prefix: str,
    query: Array,
    cache: Array,
    group: int,
    batch: ForwardBatch,
    relative_bias: Array | None = None,
) -> Array:
    """Attention over the cache with all that the layer's spec asks for: [num_tokens, num_heads, head_dim]."""
    if attn.temperature_scale:
        factors = ops.log_growth(
            batch.positions,
            factor=attn.temperature_scale,
            length=attn.temperature_length,
            shift=attn.temperature_shift,
        )
        query = ops.split_heads(ops.mul(ops.merge_heads(query), factors), head_dim=attn.head_dim)
    return ops.paged_attention(
        query,
        cache,
        batch.query_start_loc,
        batch.seq_lens,
        batch.block_tables[group],
        scale=attn.scale,
        window=attn.window,
        softcap=attn.softcap,
        sinks=params[f"{prefix}sinks"] if attn.sinks else None,
        alibi_slopes=params[f"{prefix}alibi_slopes"] if attn.alibi_max_bias else None,
        relative_bias=relative_bias,
        reach=batch.reach,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
    )


def split_and_normalize(ops: OpTable, attn: AttentionSpec, params: Params, prefix: str, x: Array) -> Array:
    """Split into heads, and normalise as the spec says: -> [num_tokens, heads, head_dim]."""
    norm, head_dim = attn.qk_norm, attn.head_dim
    if norm is None:
        return ops.split_heads(x, head_dim=head_dim)
    if attn.qk_norm_over == "all":
        return ops.split_heads(normalize(ops, norm, params, prefix, x), head_dim=head_dim)
    if attn.qk_norm_over == "head":
        return normalize(ops, norm, params, prefix, ops.split_heads(x, head_dim=head_dim))
    x = ops.split_heads(x, head_dim=head_dim)
    x = ops.rms_norm(x, None, eps=norm.eps) if norm.kind == "rms" else ops.layer_norm(x, None, None, eps=norm.eps)
    return ops.split_heads(ops.mul(ops.merge_heads(x), params[f"{prefix}weight"]), head_dim=head_dim)


def _turn(ops: OpTable, attn: AttentionSpec, x: Array, cos: Array | None, sin: Array | None) -> Array:
    """Rope, if the layer has one."""
    if attn.rope is None:
        return x
    return ops.rope(x, cos, sin, interleaved=attn.rope.interleaved)
