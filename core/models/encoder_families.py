"""Encoders that descend from BERT, and encoder-decoder models that descend from BART and T5.

Defaults are those of transformers' config classes.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..errors import ModelError
from ..weights.names import Stored
from .bert_like import bert_head, bert_like, bert_names, encoder_names, roberta_head, two_layer_head
from .config import NOTHING, HFConfig, flag
from .dense_families import FLAGS, root_of_size
from .llama_like import (
    FULL,
    SLIDING,
    ByLayer,
    layer_norm,
    llama_like,
    own_keys,
    read_activation,
    read_rope,
)
from .name_tables import IGNORE, name_table
from .recipes import Recipe, recipe
from .seq2seq import bart_like, bart_names, t5_like, t5_names
from .spec import ConvolutionSpec, DenseSpec, ModelSpec, NormSpec, PoolerSpec, Pooling

_MODERNBERT_NAMES = {
    "embed_tokens": "model.embeddings.tok_embeddings", "embed_norm": "model.embeddings.norm",
    "attn_norm": "attn_norm", "attn.o_proj": "attn.Wo", "mlp_norm": "mlp_norm", "mlp.gate_up_proj": "mlp.Wi",
    "mlp.down_proj": "mlp.Wo", "final_norm": "model.final_norm",
}  # fmt: skip
_MODERNBERT: Mapping[str, Any] = {
    "vocab_size": 50368, "hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22,
    "num_attention_heads": 12, "hidden_activation": "gelu", "max_position_embeddings": 8192, "local_attention": 128,
    "norm_eps": 1e-5, "classifier_pooling": "cls", "classifier_activation": "gelu",
}  # fmt: skip
_NOMIC_RENAMES = (
    (r"(^|\.)encoder\.layers\.", r"\1layers."),
    (r"(^|\.)emb_ln\.", r"\1embeddings.LayerNorm."),
    (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.fc11\.", ".up_proj."),
    (r"\.fc12\.", ".gate_proj."),
    (r"\.fc2\.", ".down_proj."),
    (r"\.norm1\.", ".post_attention_layernorm."),
    (r"\.norm2\.", ".post_mlp_layernorm."),
)
"""From names that Nomic's own code saves."""
_NOMIC_KEYS = {
    "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size", "layer_norm_epsilon": "layer_norm_eps", "rotary_emb_base": "rope_theta",
    "rotary_emb_fraction": "partial_rotary_factor", "max_trained_positions": "max_position_embeddings",
}  # fmt: skip
Head = Callable[[HFConfig], PoolerSpec | None]
_CONVOLUTIONS = {f"convolutions.{n}": Stored(name=f"model.encoder.conv{n + 1}", kernel=3) for n in (0, 1)}
_FSMT_TOKENS, _FSMT_HEAD = "model.decoder.embed_tokens", "model.decoder.output_projection"
_NO_BIAS = Stored(name="zeros", zeros=True)
_PRE_NORM: Mapping[str, Any] = {"layer": NOTHING, "final_norm": True}
"""Norms before the blocks of an encoder instead of behind them."""


def _distilbert(config: HFConfig) -> ModelSpec:
    """Sizes are called dim, n_heads, n_layers and hidden_dim; positions are learned or stored sinusoids."""
    own = {
        ours: config.get(theirs, config.get(ours, default))
        for ours, theirs, default in (
            ("hidden_size", "dim", 768),
            ("num_attention_heads", "n_heads", 12),
            ("num_hidden_layers", "n_layers", 6),
        )
    }
    config = config.replace(
        intermediate_size=config["hidden_dim"],
        hidden_act=config["activation"],
        layer_norm_eps=1e-12,
        type_vocab_size=0,
        **own,
    )
    return bert_like(config, pooler=two_layer_head(config, ("pre_classifier", "classifier"), "relu"))


def _bert(config: HFConfig, **options: Any) -> ModelSpec:
    return bert_like(config, pooler=bert_head(config), **options)


def _albert(config: HFConfig) -> ModelSpec:
    """All layers are the same one."""
    for key in ("num_hidden_groups", "inner_group_num"):
        if config.size(key, 1) != 1:
            raise ModelError(f"{key} in {config.file} must be 1, as in all published models, got {config[key]}")
    return _bert(config, embed_size=config.size("embedding_size"))


def _ernie(config: HFConfig) -> ModelSpec:
    """Texts are of task 0 where a model tells tasks apart."""
    num_tasks = config.size("task_type_vocab_size", 3) if config.boolean("use_task_id", False) else 0
    return _bert(config, num_task_types=num_tasks)


def _electra(config: HFConfig) -> ModelSpec:
    """A classifier's dense layer has the exact GELU."""
    return _projected(config, two_layer_head(config, ("dense", "out_proj"), "gelu"))


def _roformer(config: HFConfig) -> ModelSpec:
    """Rope turns neighbours, and in some models values, too, which is not served."""
    if config.boolean("rotary_value", False):
        raise ModelError(f"rotary_value in {config.file} must be false")
    config = config.with_defaults(hidden_size=768, num_attention_heads=12, embedding_size=None, hidden_act="gelu")
    rope = read_rope(
        own_keys(config), config.size("hidden_size") // config.size("num_attention_heads"), interleaved=True
    )
    head = two_layer_head(config, ("dense", "out_proj"), read_activation(config, "hidden_act"))
    return _projected(config, head, attn={"rope": rope}, num_learned_positions=0)


def _projected(config: HFConfig, head: PoolerSpec | None, **options: Any) -> ModelSpec:
    """Embeddings of another size than the layers'."""
    hidden_size = config.size("hidden_size")
    size = config.size("embedding_size", hidden_size)
    return bert_like(config, pooler=head, embed_size=0 if size == hidden_size else size, **options)


def _eurobert(config: HFConfig) -> ModelSpec:
    kinds = {"bos": "cls", "mean": "mean"}
    pooling = config.text("classifier_pooling", "late")
    head = two_layer_head(config, ("dense", "classifier"), "gelu", "mean" if pooling == "mean" else "cls")
    if head is not None and pooling not in kinds:
        raise ModelError(f"{config.file} pools by {pooling!r} behind its head; served are {', '.join(kinds)}")
    return llama_like(config, rms_norm_eps=1e-5, kind="encoder", pooler=head, **FLAGS)


def _modernbert(config: HFConfig, *, itself: int = 1, **options: Any) -> ModelSpec:
    """Every third layer sees all tokens, the others `local_attention` / 2 on either side, and the one between if
    itself is 1."""
    every = config.size("global_attn_every_n_layers", 3)
    kinds = config.texts("layer_types") or [SLIDING if i % every else FULL for i in range(config.num_layers())]
    norm = layer_norm(config, "norm_eps", bias=config.boolean("norm_bias", False))
    half = config.size("local_attention") // 2
    ropes = config.replace(
        rope_scaling=None,
        rope_parameters=_modernbert_ropes(config),
        head_dim=None,
        num_key_value_heads=None,
        sliding_window=half + 1 if itself else config.size("sliding_window", half),
        tie_word_embeddings=False,
    )
    return llama_like(
        ropes,
        layer_types=kinds,
        activation_key="hidden_activation",
        norm=norm,
        attn_bias=flag("attention_bias"),
        mlp_bias=flag("mlp_bias"),
        embed_norm=True,
        max_position_embeddings=config.size("max_position_embeddings"),
        # The embedding's norm stands for that of the first attention.
        layer={"attn_pre_norm": ByLayer(i > 0 for i in range(len(kinds)))},
        **{"kind": "encoder", "pooler": _modernbert_head(config, norm), **options},
    )


def _modernbert_head(config: HFConfig, norm: NormSpec) -> PoolerSpec | None:
    kind: Pooling = "mean" if config.text("classifier_pooling") == "mean" else "cls"
    activation = read_activation(config, "classifier_activation")
    bias = config.boolean("classifier_bias", False)
    return two_layer_head(config, ("dense", "classifier"), activation, kind, bias=bias, norm=norm)


def _modernbert_ropes(config: HFConfig) -> Mapping[str, Any]:
    """Rope parameters for each kind of layer; older files have two thetas at the top."""
    stated = HFConfig(config.mapping("rope_parameters"), file=f"rope_parameters of {config.file}")
    full = config.number("global_rope_theta", 160_000.0)
    thetas = {FULL: full, SLIDING: config.number("local_rope_theta", 10_000.0, null=full)}
    scaling = config.mapping("rope_scaling")
    return {kind: {"rope_theta": theta, **scaling, **stated.mapping(kind)} for kind, theta in thetas.items()}


def _modernbert_decoder(config: HFConfig) -> ModelSpec:
    """A window is `local_attention` / 2 tokens, the last one included."""
    size = config.size("hidden_size")
    transform = DenseSpec(
        name="lm_head_dense",
        in_features=size,
        out_features=size,
        bias=config.boolean("classifier_bias", False),
        activation=read_activation(config, "classifier_activation"),
        norm=layer_norm(config, "norm_eps", bias=config.boolean("norm_bias", False)),
    )
    return _modernbert(
        config,
        itself=0,
        kind="decoder",
        pooler=None,
        head_transform=transform,
        lm_head_bias=config.boolean("decoder_bias", True),
        tie_word_embeddings=config.boolean("tie_word_embeddings", True),
    )


def _mpnet(config: HFConfig) -> ModelSpec:
    """transformers' own code reads 32 buckets, however many the config says, and begins positions behind 1."""
    num_buckets, head = config.size("relative_attention_num_buckets"), roberta_head(config)
    if num_buckets < 32:
        raise ModelError(f"relative_attention_num_buckets in {config.file} must be at least 32, got {num_buckets}")
    config, rows = config.replace(type_vocab_size=0), tuple(range(32)) if num_buckets > 32 else ()
    return bert_like(config, first_position=2, pooler=head, num_relative_buckets=num_buckets, relative_rows=rows)


def _nomic_bert(config: HFConfig) -> ModelSpec:
    """Takes the keys of Nomic's own code, which are GPT-2's, as well."""
    if "n_embd" in config:
        config = config.replace(hidden_act="silu").with_defaults(
            **{new: config[old] for old, new in _NOMIC_KEYS.items() if old in config}
        )
    config = config.with_defaults(
        vocab_size=30528, hidden_act="silu", max_position_embeddings=2048, rope_theta=1000.0, hidden_size=768,
        num_attention_heads=12,
    )  # fmt: skip
    return _turned(config, attn_bias=False, mlp_bias=False, mlp={"gated": True})


def _turned(config: HFConfig, *, head: Head = bert_head, **options: Any) -> ModelSpec:
    """Rope in the place of learned positions."""
    config = config.with_defaults(hidden_size=768, num_attention_heads=12, max_position_embeddings=8192)
    head_dim = config.size("head_dim", config.size("hidden_size") // config.size("num_attention_heads") or None)
    attn = {"head_dim": head_dim, "scale": head_dim**-0.5, "rope": read_rope(config, head_dim)}
    return bert_like(config, pooler=head(config), attn=attn, num_learned_positions=0, **options)


def _roberta(config: HFConfig, **options: Any) -> ModelSpec:
    """Position 0 has the row pad_token_id + 1, so that there are as many positions less."""
    first = config.integer("pad_token_id") + 1
    return bert_like(config, first_position=first, pooler=roberta_head(config), **options)


def _m2m(config: HFConfig, **options: Any) -> ModelSpec:
    """Positions begin behind that of padding."""
    return bart_like(config, first_position=config.integer("pad_token_id") + 1, **options)


def _marian(config: HFConfig) -> ModelSpec:
    """The halves may have embeddings, and vocabularies, of their own."""
    spec = bart_like(config, sinusoids="interleaved")
    size = config.integer("decoder_vocab_size", spec.vocab_size, null=spec.vocab_size)
    if config.boolean("share_encoder_decoder_embeddings", True):
        if size != spec.vocab_size:
            raise ModelError(f"decoder_vocab_size in {config.file} is not vocab_size, but embeddings are shared")
        return spec
    assert spec.encoder is not None
    encoder = dataclasses.replace(spec.encoder, shares_embedding=False)
    return dataclasses.replace(spec, vocab_size=size, encoder=encoder)


def _fsmt(config: HFConfig) -> ModelSpec:
    """The halves have vocabularies of their own, unless embeddings are tied."""
    read, written = (
        config.size("src_vocab_size", 42024),
        config.size("tgt_vocab_size", config.size("vocab_size", 42024)),
    )
    if read != written and config.boolean("tie_word_embeddings", False):
        raise ModelError(f"src_vocab_size in {config.file} is not tgt_vocab_size, but embeddings are shared")
    config = config.with_defaults(tie_word_embeddings=False).replace(vocab_size=written)
    spec = _m2m(config, sinusoids="halves", lm_head_bias=False)
    assert spec.encoder is not None
    return dataclasses.replace(spec, encoder=dataclasses.replace(spec.encoder, vocab_size=read))


def _whisper(config: HFConfig) -> ModelSpec:
    """Keys have no bias, unlike queries and values. 30 s of speech are 3000 frames and 1500 positions."""
    length = config.size("max_source_positions", 1500)
    return bart_like(
        config.replace(max_position_embeddings=config.size("max_target_positions", 448), scale_embedding=False),
        pre_norm=True,
        final_norm=True,
        lm_head_bias=False,
        encoder={
            "num_features": config.size("num_mel_bins", 80),
            "convolutions": (ConvolutionSpec(kernel=3), ConvolutionSpec(kernel=3, stride=2)),
            "shares_embedding": False,
            "num_learned_positions": length,
            "max_position_embeddings": length,
        },
    )


ENCODER_FAMILIES: Mapping[str, Recipe] = {
    # ALBERT (Lan et al. 2019): BERT of one layer that is passed many times, with smaller embeddings.
    "albert": recipe(
        _albert,
        defaults=dict(
            vocab_size=30000, embedding_size=128, hidden_size=4096, num_attention_heads=64, intermediate_size=16384,
            hidden_act="gelu_new",
        ),
        names=partial(
            bert_names, "albert.", layer="encoder.albert_layer_groups.0.albert_layers.0.",
            changes={
                **{f"attn.{query[0]}_proj": f"attention.{query}" for query in ("query", "key", "value")},
                "attn.o_proj": "attention.dense", "mlp.up_proj": "ffn", "mlp.down_proj": "ffn_output",
                "mlp_post_norm": "full_layer_layer_norm",
            },
            renames=((r"^(albert\.)?pooler\.", r"\1pooler.dense."), (r"^(predictions|sop_classifier)\.", "cls.")),
        ),
    ),
    # BERT (Devlin et al. 2018), and what is saved as it: MiniLM, BGE, E5 and many more.
    "bert": recipe(_bert, defaults=dict(vocab_size=30522, hidden_size=768), names=partial(bert_names, "bert.")),
    # data2vec (Baevski et al. 2022), of text: RoBERTa.
    "data2vec_text": recipe(
        _roberta, defaults=dict(vocab_size=30522, hidden_size=768, pad_token_id=1),
        names=partial(bert_names, "data2vec_text."),
    ),
    # DistilBERT (Sanh et al. 2019): BERT without token types, and with names of its own.
    "distilbert": recipe(
        _distilbert, defaults=dict(vocab_size=30522, hidden_dim=3072, activation="gelu"),
        names=partial(bert_names, "distilbert.", layer="transformer.layer.{i}."),
    ),
    # ELECTRA (Clark et al. 2020): BERT whose embeddings may be smaller than the layers.
    "electra": recipe(
        _electra,
        defaults=dict(
            vocab_size=30522, embedding_size=128, hidden_size=256, num_attention_heads=4, intermediate_size=1024,
        ),
        names=partial(bert_names, "electra."),
    ),
    # ERNIE (Sun et al. 2019): BERT that may have an embedding of tasks.
    "ernie": recipe(
        _ernie, defaults=dict(vocab_size=30522, hidden_size=768),
        names=partial(
            bert_names, "ernie.", changes=dict(embed_task_types="ernie.embeddings.task_type_embeddings"),
        ),
    ),
    # EuroBERT (Boizard et al. 2025): Llama that sees in both directions.
    "eurobert": recipe(_eurobert, defaults=dict(max_position_embeddings=8192)),
    # GTE 1.5 and multilingual (Zhang et al. 2024): BERT with rope and gated feed-forward blocks. Its own code saves
    # query, key and value, and the gate behind what it multiplies, as one.
    "gte": recipe(
        _turned, defaults=dict(vocab_size=250048, type_vocab_size=1, rope_theta=160000.0),
        names=partial(
            bert_names, "gte.", layer="layers.{i}.",
            changes={
                "attn.qkv_proj": "attention.qkv_proj", "attn.o_proj": "self_attn.o_proj attention.o_proj",
                "attn_post_norm": "post_attention_layernorm attn_ln", "mlp_post_norm": "post_mlp_layernorm mlp_ln",
                "mlp.gate_up_proj": Stored(name="mlp.up_gate_proj", interleaved=True, groups=1, order=(1, 0)),
            },
            tensors=dict.fromkeys(("mlp.gate_proj.bias", "mlp.up_proj.bias"), _NO_BIAS),
            renames=((r"^new\.", "gte."), (r"(^|\.)encoder\.layer\.", r"\1layers.")),
        ),
        mlp=dict(gated=True),
    ),
    # Jina Embeddings 3 (Sturua et al. 2024), without the adapters of tasks: XLM-RoBERTa with rope.
    "jina_embeddings_v3": recipe(
        _turned,
        defaults=dict(
            vocab_size=250002, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, type_vocab_size=1,
            intermediate_size=4096, layer_norm_eps=1e-5, rope_theta=20000.0, max_position_embeddings=8194,
        ),
        names=partial(
            bert_names, "roberta.", layer="layers.{i}.",
            changes={
                "attn.qkv_proj": "mixer.Wqkv", "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2",
                "attn.o_proj": "self_attn.o_proj mixer.out_proj", "attn_post_norm": "post_attention_layernorm norm1",
                "mlp_post_norm": "post_mlp_layernorm norm2",
            },
            renames=((r"(^|\.)encoder\.layers\.", r"\1layers."), (r"(^|\.)emb_ln\.", r"\1embeddings.LayerNorm.")),
        ),
        head=roberta_head,
    ),
    # Megatron's BERT: norms before the blocks and at the end, none of embeddings.
    "megatron_bert": recipe(
        _bert,
        defaults=dict(
            vocab_size=29056, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        ),
        names=partial(
            bert_names, "bert.", changes=dict(attn_norm="attention.ln", mlp_norm="ln", final_norm="bert.encoder.ln"),
        ),
        **_PRE_NORM, embed_norm=False,
    ),
    # ModernBERT (Warner et al. 2024): norms before the blocks, gated feed-forward, rope, layers with a window.
    "modernbert": recipe(
        _modernbert, defaults=_MODERNBERT,
        names=partial(
            encoder_names, {**_MODERNBERT_NAMES, "attn.qkv_proj": "attn.Wqkv"},
            dict(dense="head.dense", dense_norm="head.norm"), layer="model.layers.{i}.", prefix="model.",
            ignore=(r"^(head\.dense|head\.norm|decoder)\.(weight|bias)$", r"inv_freq$"),
        ),
    ),
    # ModernBERT's decoders (Ettin): its layers, causal, and its head before the embedding.
    "modernbert_decoder": recipe(
        _modernbert_decoder, defaults=_MODERNBERT,
        names=lambda: name_table(
            {
                **_MODERNBERT_NAMES, **{f"attn.{name}_proj": f"attn.{name}_proj" for name in "qkv"},
                "lm_head_dense": "lm_head.dense", "lm_head_dense_norm": "lm_head.norm", "lm_head": "decoder",
            },
            ignore=(*IGNORE, r"^decoder\.weight$"),
        ),
    ),
    # MPNet (Song et al. 2020): RoBERTa's positions, no token types, and a bias of attention by distance.
    "mpnet": recipe(
        _mpnet, defaults=dict(vocab_size=30527, hidden_size=768, relative_attention_num_buckets=32),
        names=partial(bert_names, "mpnet."),
    ),
    # Nomic BERT (Nussbaum et al. 2024): BERT with rope and a gated feed-forward block, without biases there.
    "nomic_bert": recipe(
        _nomic_bert,
        names=partial(bert_names, "nomic_bert.", layer="layers.{i}.", renames=_NOMIC_RENAMES),
    ),
    # RemBERT (Chung et al. 2020): BERT with smaller embeddings.
    "rembert": recipe(
        _bert,
        defaults=dict(
            vocab_size=250300, hidden_size=1152, num_hidden_layers=32, num_attention_heads=18, intermediate_size=4608,
        ),
        names=partial(bert_names, "rembert."),
        embed_size=lambda config: config.size("input_embedding_size", 256),
    ),
    # RoFormer (Su et al. 2021): BERT with rope.
    "roformer": recipe(
        _roformer, defaults=dict(vocab_size=50000, max_position_embeddings=1536),
        names=partial(bert_names, "roformer."),
    ),
    # RoBERTa with norms before its blocks and at the end (Ott et al. 2019).
    "roberta_prelayernorm": recipe(
        _roberta, defaults=dict(vocab_size=50265, hidden_size=768, pad_token_id=1),
        names=partial(
            bert_names, "roberta_prelayernorm.",
            changes=dict(
                attn_norm="attention.LayerNorm", mlp_norm="intermediate.LayerNorm",
                final_norm="roberta_prelayernorm.LayerNorm",
            ),
        ),
        **_PRE_NORM,
    ),
    # XLM-RoBERTa XL (Goyal et al. 2021): the same without a norm of embeddings.
    "xlm_roberta_xl": recipe(
        _roberta,
        defaults=dict(
            vocab_size=250880, hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, type_vocab_size=1,
            intermediate_size=10240, max_position_embeddings=514, layer_norm_eps=1e-5, pad_token_id=1,
        ),
        names=partial(
            bert_names, "roberta.",
            changes=dict(
                attn_norm="attention.self_attn_layer_norm", mlp_norm="LayerNorm",
                final_norm="roberta.encoder.LayerNorm",
            ),
        ),
        **_PRE_NORM, embed_norm=False,
    ),
    # RoBERTa (Liu et al. 2019), and CamemBERT and XLM-RoBERTa: BERT whose positions begin behind padding's id.
    "roberta": recipe(
        _roberta, defaults=dict(vocab_size=50265, hidden_size=768, pad_token_id=1),
        names=partial(bert_names, "roberta."),
    ),
    # BART (Lewis et al. 2019): norms after each residual add, learned positions that begin in row 2. transformers no
    # longer reads the flags that once told BART's relatives apart.
    "bart": recipe(bart_like, names=partial(bart_names, skip_positions=2), embed_norm=True),
    # Blenderbot (Roller et al. 2020): BART with norms before its blocks and at the end, none of embeddings. The
    # context is short: 128 tokens.
    "blenderbot": recipe(
        bart_like, defaults=dict(max_position_embeddings=128), names=bart_names,
        pre_norm=True, final_norm=True,
    ),
    # FSMT, fairseq's WMT 19 (Ng et al. 2019): BART with sinusoids and no norm of embeddings.
    "fsmt": recipe(
        _fsmt,
        defaults=dict(
            activation_function="relu", scale_embedding=True, pad_token_id=1, d_model=1024, encoder_layers=12,
            encoder_ffn_dim=4096, decoder_layers=12, decoder_ffn_dim=4096, encoder_attention_heads=16,
            decoder_attention_heads=16,
        ),
        names=partial(
            bart_names,
            changes=dict(
                embed_tokens=Stored(name=_FSMT_TOKENS, copies=("model.encoder.embed_tokens", _FSMT_HEAD)),
                lm_head=_FSMT_HEAD,
            ),
        ),
    ),
    # Blenderbot Small: BART, whose decoder adds positions behind the norm of its embeddings, and does not scale them.
    "blenderbot_small": recipe(
        bart_like, defaults=dict(max_position_embeddings=512), names=bart_names,
        embed_norm=True, positions_last=True, embed_scale=1.0,
        encoder=dict(
            positions_last=False, embed_scale=lambda c: root_of_size(c) if c.boolean("scale_embedding") else 1.0,
        ),
    ),
    # M2M-100 and NLLB (Fan et al. 2020): BART with sinusoids that begin in row 2, and norms before its blocks.
    "m2m_100": recipe(
        _m2m, defaults=dict(activation_function="relu", scale_embedding=True, pad_token_id=1),
        names=bart_names, pre_norm=True, final_norm=True, lm_head_bias=False,
        sinusoids="halves",
    ),
    # Marian (Junczys-Dowmunt et al. 2018), Opus-MT's translators: BART with sinusoids and no norm of embeddings.
    "marian": recipe(
        _marian, names=bart_names,
    ),
    # mBART and mBART-50 (Liu et al. 2020): BART with norms before its blocks and at the end.
    "mbart": recipe(
        bart_like, names=partial(bart_names, skip_positions=2), pre_norm=True,
        embed_norm=True, final_norm=True,
    ),
    # mT5 (Xue et al. 2020): T5 v1.1, whose output is never scaled, whatever the config says of its head.
    "mt5": recipe(t5_like, defaults=dict(feed_forward_proj="gated-gelu"), names=t5_names, scales_output=False),
    # Pegasus (Zhang et al. 2019): BART with sinusoids, norms before its blocks and at the end, none of embeddings.
    "pegasus": recipe(
        bart_like, names=bart_names, pre_norm=True, final_norm=True,
        sinusoids="interleaved",
    ),
    # T5, T5 v1.1, Flan-T5, ByT5, UL2 (Raffel et al. 2019): one bias by distance for all layers of each half. The
    # feed-forward block is gated where the config says so.
    "t5": recipe(t5_like, names=t5_names),
    # UMT5 (Chung et al. 2023): T5 v1.1 with a bias by distance in each layer.
    "umt5": recipe(
        t5_like, defaults=dict(feed_forward_proj="gated-gelu"), names=partial(t5_names, bias_by_layer=True),
        bias_by_layer=True,
    ),
    # Whisper (Radford et al. 2022): an encoder of mel spectrograms behind two convolutions, and BART's decoder.
    "whisper": recipe(
        _whisper,
        names=partial(
            bart_names,
            changes=dict(embed_tokens=Stored(name="model.decoder.embed_tokens", copies=("proj_out",))),
            encoder_changes=_CONVOLUTIONS, tensors={"attn.k_proj.bias": _NO_BIAS, "cross.k_proj.bias": _NO_BIAS},
        ),
    ),
}  # fmt: skip
"""model_type -> what sets it apart."""
