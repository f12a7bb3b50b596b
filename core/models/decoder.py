"""The forward function of decoder-only models: one walk over a spec, arrays touched through ops alone.

The same function runs eagerly, is captured, or is traced into a program; so nothing here looks at a value.
"""

from collections.abc import Mapping

from ..ops.table import OpTable
from ..stages import Array, ForwardBatch, KVCaches
from .declare import rope_numbers
from .rope import num_rope_variants
from .spec import AttentionSpec, MlpSpec, ModelSpec, NormSpec, RopeSpec

Params = Mapping[str, Array]
"""Parameters by canonical name, as `declare_params` lists them."""


def decoder(
    ops: OpTable, spec: ModelSpec, params: Params, kv: KVCaches, batch: ForwardBatch
) -> tuple[Array, KVCaches]:
    """Hidden states after the last norm, [num_tokens, hidden_size], and the caches with this step's keys and values.

    batch.input_ids holds token ids only (the runner has filled in what was unknown). Each layer writes the keys
    and values of the whole batch before its attention reads any. Mutates the caches in `kv`.
    """
    residual = ops.embedding(batch.input_ids, params["embed_tokens.weight"])
    if spec.embed_scale != 1.0:
        residual = ops.scale(residual, spec.embed_scale)
    if spec.num_learned_positions:
        residual = ops.add(residual, ops.embedding(batch.positions, params["embed_positions.weight"]))
    block: Array = None  # output of the last attention or feed-forward block, not yet added to the residual
    angles: list[tuple[Array, Array]] = []  # cosines and sines of each different rope
    caches: list[Array] = []
    for i, (layer, number) in enumerate(zip(spec.layers, rope_numbers(spec), strict=True)):
        prefix = f"layers.{i}."
        if layer.attn.rope is not None and number == len(angles):
            angles.append(_angles(ops, layer.attn.rope, f"rope.{number}.", params, batch))

        x, residual = _enter(ops, spec.norm, params, f"{prefix}attn_norm.", block, residual, layer.pre_norm)
        group, cache = kv.group_of_layer[i], kv.layers[i]
        turns = None if number < 0 else angles[number]
        block, cache = _attention(ops, layer.attn, params, f"{prefix}attn.", x, turns, cache, group, batch)
        caches.append(cache)
        if layer.post_norm:
            block = _norm(ops, spec.norm, params, f"{prefix}attn_post_norm.", block)

        x, residual = _enter(ops, spec.norm, params, f"{prefix}mlp_norm.", block, residual, layer.pre_norm)
        block = _mlp(ops, layer.mlp, params, f"{prefix}mlp.", x)
        if layer.post_norm:
            block = _norm(ops, spec.norm, params, f"{prefix}mlp_post_norm.", block)
    hidden_states, _ = _enter(ops, spec.norm, params, "final_norm.", block, residual, True)
    return hidden_states, KVCaches(layers=caches, group_of_layer=kv.group_of_layer)


def compute_logits(ops: OpTable, spec: ModelSpec, params: Params, hidden_states: Array) -> Array:
    """Logits of gathered hidden states: [n, hidden_size] -> float32 [n, vocab_size]."""
    weight = params["embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight"]
    bias = params["lm_head.bias"] if spec.lm_head_bias else None
    logits = ops.cast(ops.linear(hidden_states, weight, bias), dtype="float32")
    if spec.logit_scale != 1.0:
        logits = ops.scale(logits, spec.logit_scale)
    return ops.softcap(logits, spec.logit_softcap) if spec.logit_softcap else logits


def _attention(
    ops: OpTable,
    attn: AttentionSpec,
    params: Params,
    prefix: str,
    x: Array,
    turns: tuple[Array, Array] | None,
    cache: Array,
    group: int,
    batch: ForwardBatch,
) -> tuple[Array, Array]:
    """Self-attention of [num_tokens, hidden_size]; returns that shape and the layer's cache."""
    num_heads, num_kv_heads, head_dim = attn.num_heads, attn.num_kv_heads, attn.head_dim
    bias = params[f"{prefix}qkv_proj.bias"] if attn.qkv_bias else None
    qkv = ops.linear(x, params[f"{prefix}qkv_proj.weight"], bias)
    query, key, value = ops.split(qkv, (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim))
    query, key = ops.split_heads(query, head_dim=head_dim), ops.split_heads(key, head_dim=head_dim)
    if attn.qk_norm is not None:
        query = _norm(ops, attn.qk_norm, params, f"{prefix}q_norm.", query)
        key = _norm(ops, attn.qk_norm, params, f"{prefix}k_norm.", key)
    if attn.rope is not None and turns is not None:
        cos, sin = turns
        query = ops.rope(query, cos, sin, interleaved=attn.rope.interleaved)
        key = ops.rope(key, cos, sin, interleaved=attn.rope.interleaved)
    cache = ops.write_kv(cache, key, ops.split_heads(value, head_dim=head_dim), batch.slot_mappings[group])
    out = ops.paged_attention(
        query,
        cache,
        batch.query_start_loc,
        batch.seq_lens,
        batch.block_tables[group],
        scale=attn.scale,
        window=attn.window,
        softcap=attn.softcap,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
    )
    bias = params[f"{prefix}o_proj.bias"] if attn.o_bias else None
    return ops.linear(ops.merge_heads(out), params[f"{prefix}o_proj.weight"], bias), cache


def _mlp(ops: OpTable, mlp: MlpSpec, params: Params, prefix: str, x: Array) -> Array:
    """Feed-forward block of [num_tokens, hidden_size]."""
    name = "gate_up_proj" if mlp.gated else "up_proj"
    bias = params[f"{prefix}{name}.bias"] if mlp.bias else None
    up = ops.linear(x, params[f"{prefix}{name}.weight"], bias)
    up = ops.act_mul(up, activation=mlp.activation) if mlp.gated else ops.act(up, activation=mlp.activation)
    bias = params[f"{prefix}down_proj.bias"] if mlp.bias else None
    return ops.linear(up, params[f"{prefix}down_proj.weight"], bias)


def _enter(
    ops: OpTable,
    norm: NormSpec,
    params: Params,
    prefix: str,
    block: Array | None,
    residual: Array,
    has_norm: bool,
) -> tuple[Array, Array]:
    """Add the last block's output to the residual and normalise the sum: (input of the next block, residual)."""
    if block is not None:
        if has_norm and norm.kind == "rms":
            weight = params[f"{prefix}weight"] if norm.weight else None
            return ops.add_rms_norm(block, residual, weight, eps=norm.eps)
        residual = ops.add(block, residual)
    return (_norm(ops, norm, params, prefix, residual) if has_norm else residual), residual


def _norm(ops: OpTable, norm: NormSpec, params: Params, prefix: str, x: Array) -> Array:
    weight = params[f"{prefix}weight"] if norm.weight else None
    if norm.kind == "rms":
        return ops.rms_norm(x, weight, eps=norm.eps)
    bias = params[f"{prefix}bias"] if norm.bias else None
    return ops.layer_norm(x, weight, bias, eps=norm.eps)


def _angles(ops: OpTable, rope: RopeSpec, prefix: str, params: Params, batch: ForwardBatch) -> tuple[Array, Array]:
    """Cosines and sines of this step for one rope."""
    rows = batch.rope_rows if num_rope_variants(rope) > 1 else None
    inv_freq, attention_factor = params[f"{prefix}inv_freq"], params[f"{prefix}attention_factor"]
    return ops.rotary_angles(batch.positions, inv_freq, attention_factor, rows)
