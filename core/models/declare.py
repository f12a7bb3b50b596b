"""The parameters of a spec, in the order in which a forward pass reads them."""

from collections.abc import Iterator

from .params import Param, Part, Shard
from .rope import num_rope_variants, rope_tables
from .spec import AttentionSpec, MlpSpec, ModelSpec, NormSpec, RopeSpec


def declare_params(spec: ModelSpec) -> tuple[Param, ...]:
    """Every parameter of a model. A tied model has no lm_head.weight: embed_tokens.weight serves as both."""
    return tuple(_decoder(spec))


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


def _decoder(spec: ModelSpec) -> Iterator[Param]:
    hidden = spec.hidden_size
    yield Param(name="embed_tokens.weight", shape=(spec.vocab_size, hidden), kind="embedding", shard="vocab")
    if spec.num_learned_positions:
        yield Param(name="embed_positions.weight", shape=(spec.num_learned_positions, hidden), kind="embedding")
    for n, rope in enumerate(distinct_ropes(spec)):
        yield from _rope(rope, f"rope.{n}")
    for i, layer in enumerate(spec.layers):
        prefix = f"layers.{i}"
        if layer.pre_norm:
            yield from _norm(spec.norm, f"{prefix}.attn_norm", hidden)
        yield from _attention(layer.attn, f"{prefix}.attn", hidden)
        if layer.post_norm:
            yield from _norm(spec.norm, f"{prefix}.attn_post_norm", hidden)
        if layer.pre_norm:
            yield from _norm(spec.norm, f"{prefix}.mlp_norm", hidden)
        yield from _mlp(layer.mlp, f"{prefix}.mlp", hidden)
        if layer.post_norm:
            yield from _norm(spec.norm, f"{prefix}.mlp_post_norm", hidden)
    yield from _norm(spec.norm, "final_norm", hidden)
    if not spec.tie_word_embeddings:
        yield Param(name="lm_head.weight", shape=(spec.vocab_size, hidden), kind="linear", shard="vocab")
    if spec.lm_head_bias:
        yield Param(name="lm_head.bias", shape=(spec.vocab_size,), kind="vector", shard="vocab")


def _attention(attn: AttentionSpec, prefix: str, hidden_size: int) -> Iterator[Param]:
    query_rows, kv_rows = attn.num_heads * attn.head_dim, attn.num_kv_heads * attn.head_dim
    rows = {"q_proj": query_rows, "k_proj": kv_rows, "v_proj": kv_rows}
    yield from _fused(f"{prefix}.qkv_proj", prefix, rows, hidden_size, attn.qkv_bias)
    if attn.qk_norm is not None:
        yield from _norm(attn.qk_norm, f"{prefix}.q_norm", attn.head_dim)
        yield from _norm(attn.qk_norm, f"{prefix}.k_norm", attn.head_dim)
    yield from _linear(f"{prefix}.o_proj", hidden_size, query_rows, "row", attn.o_bias)


def _mlp(mlp: MlpSpec, prefix: str, hidden_size: int) -> Iterator[Param]:
    size = mlp.intermediate_size
    if mlp.gated:
        rows = {"gate_proj": size, "up_proj": size}
        yield from _fused(f"{prefix}.gate_up_proj", prefix, rows, hidden_size, mlp.bias)
    else:
        yield from _linear(f"{prefix}.up_proj", size, hidden_size, "column", mlp.bias)
    yield from _linear(f"{prefix}.down_proj", hidden_size, size, "row", mlp.bias)


def _fused(name: str, prefix: str, rows: dict[str, int], in_features: int, bias: bool) -> Iterator[Param]:
    def parts(leaf: str) -> tuple[Part, ...]:
        return tuple(Part(name=f"{prefix}.{part}.{leaf}", rows=count) for part, count in rows.items())

    out = sum(rows.values())
    yield Param(
        name=f"{name}.weight",
        shape=(out, in_features),
        kind="linear",
        shard="column",
        parts=parts("weight"),
        quantizable=True,
    )
    if bias:
        yield Param(name=f"{name}.bias", shape=(out,), kind="vector", shard="column", parts=parts("bias"))


def _linear(name: str, out_features: int, in_features: int, shard: Shard, bias: bool) -> Iterator[Param]:
    shape = (out_features, in_features)
    yield Param(name=f"{name}.weight", shape=shape, kind="linear", shard=shard, quantizable=True)
    if bias:
        # A row-cut product is summed over ranks, so that its bias must stay whole and be added once.
        bias_shard: Shard = "replicated" if shard == "row" else shard
        yield Param(name=f"{name}.bias", shape=(out_features,), kind="vector", shard=bias_shard)


def _norm(norm: NormSpec, name: str, size: int) -> Iterator[Param]:
    if norm.weight:
        yield Param(name=f"{name}.weight", shape=(size,), kind="vector", plus_one=norm.plus_one)
    if norm.bias:
        yield Param(name=f"{name}.bias", shape=(size,), kind="vector")


def _rope(rope: RopeSpec, prefix: str) -> Iterator[Param]:
    variants = num_rope_variants(rope)
    yield Param(
        name=f"{prefix}.inv_freq",
        shape=(variants, rope.rotary_dim // 2),
        kind="constant",
        compute=lambda: rope_tables(rope)[0],
    )
    yield Param(
        name=f"{prefix}.attention_factor",
        shape=(variants,),
        kind="constant",
        compute=lambda: rope_tables(rope)[1],
    )
