"""How the tokens of a forward pass see each other: through caches, or whole requests at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ..stages import Array, EncoderBatch, ForwardBatch, KVCaches
from .constants import alibi_slopes, padding_marks
from .scope import Scope
from .spec import AttentionSpec, ModelSpec

States = Sequence[Array]
"""The states of one layer, as `state_shapes` lists them."""
Kept = tuple[Array, Array] | None
"""Keys and values of a layer, each [num_tokens, num_kv_heads, head_dim]; None if it reads those of another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caches:
    """The caches of a decoder during a pass over `batch`. layers, states: as this pass has left them so far."""

    batch: ForwardBatch
    kv: KVCaches
    layers: list[Array]
    states: list[States]

    def attend(
        self, at: Scope, attn: AttentionSpec, layer_idx: int, bias: Array | None, query: Array, kept: Kept
    ) -> Array:
        """Attention over the layer's cache, or over the cache of the layer whose keys and values it reads, with all
        that the spec asks for. kept: what the cache takes before."""
        ops, batch = at.ops, self.batch
        owner = attn.kv_layer if attn.kv_layer >= 0 else layer_idx
        group = self.kv.group_of_layer[owner]
        if kept is not None:
            key, value = kept
            self.layers[owner] = ops.write_kv(self.layers[owner], key, value, batch.slot_mappings[group])
        if attn.temperature_scale:
            factors = ops.log_growth(
                batch.positions,
                factor=attn.temperature_scale,
                length=attn.temperature_length,
                shift=attn.temperature_shift,
            )
            query = ops.split_heads(ops.mul(ops.merge_heads(query), factors), head_dim=attn.head_dim)
        slopes = None
        if attn.alibi_max_bias:
            compute = partial(alibi_slopes, attn)
            slopes = at.constant("alibi_slopes", attn.num_heads, shard="column", compute=compute)
        return ops.paged_attention(
            query,
            self.layers[owner],
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_tables[group],
            scale=attn.scale,
            window=attn.window,
            chunk=attn.chunk,
            softcap=attn.softcap,
            sinks=at.param("sinks", attn.num_heads, shard="column") if attn.sinks else None,
            alibi_slopes=slopes,
            relative_bias=bias,
            reach=batch.reach,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
        )

    def attend_encoder(self, at: Scope, cross: AttentionSpec, layer_idx: int, query: Array) -> Array:
        """Attention over all that an encoder made of each request's other input, of query's shape."""
        batch = self.batch
        return at.ops.paged_attention(
            query,
            self.kv.cross[layer_idx],
            batch.query_start_loc,
            batch.encoder_lens,
            batch.block_tables[self.kv.cross_group],
            scale=cross.scale,
            causal=False,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_encoder_len,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRequests:
    """Every token of an encoder sees all tokens of its request, and nothing is cached."""

    batch: ForwardBatch | EncoderBatch

    def attend(
        self, at: Scope, attn: AttentionSpec, layer_idx: int, bias: Array | None, query: Array, kept: Kept
    ) -> Array:
        """Attention in both directions."""
        assert kept is not None, "layers of an encoder have keys and values of their own"
        ops, batch = at.ops, self.batch
        key, value = kept
        if attn.has_padding:
            heads, vision = attn.num_heads, at.root.inside("vision")
            marks = vision.table("marks", 2, heads * 8, compute=partial(padding_marks, heads))
            marks = ops.split_heads(ops.embedding(batch.padding, marks), head_dim=8)
            query, key = ops.concat((query, marks)), ops.concat((key, ops.scale(marks, -1.0)))
            value = ops.concat((value, ops.scale(marks, 0.0)))
        out = ops.encoder_attention(
            query,
            key,
            value,
            batch.window_start_loc if attn.in_window else batch.query_start_loc,
            bias,
            scale=attn.scale,
            window=attn.window,
            softcap=attn.softcap,
            max_query_len=batch.max_query_len,
        )
        if attn.has_padding:
            out, _ = ops.split(out, (attn.head_dim, 8))
        return out


Memory = Caches | WholeRequests


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What the tokens of one layer see: `memory`, by what turns heads before (cos, sin; None without rope) and what
    is added to scores by distance (relative_bias: float32 [num_buckets, num_heads])."""

    memory: Memory
    layer_idx: int
    cos: Array | None = None
    sin: Array | None = None
    relative_bias: Array | None = None

    @property
    def caches(self) -> Caches:
        """Those of a decoder."""
        assert isinstance(self.memory, Caches), "an encoder keeps nothing"
        return self.memory

    def attend(self, at: Scope, attn: AttentionSpec, query: Array, kept: Kept) -> Array:
        """Attention by heads of queries, [num_tokens, num_heads, head_dim]; returns that shape."""
        return self.memory.attend(at, attn, self.layer_idx, self.relative_bias, query, kept)


def open_caches(spec: ModelSpec, kv: KVCaches, batch: ForwardBatch) -> Caches:
    """The caches at the start of a pass."""
    states = [kv.states[i] if layer.mixer is not None else () for i, layer in enumerate(spec.layers)]
    return Caches(batch=batch, kv=kv, layers=[*kv.layers], states=states)
