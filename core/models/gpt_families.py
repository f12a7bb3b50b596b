"""Decoders that descend from GPT and BART: what a reader makes of a config, but for what their entries say.

Defaults are those of transformers' config classes.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from ..errors import ModelError
from ..weights.names import NameTable, Stored
from .config import NOTHING, HFConfig, flag, number
from .dense_families import FLAGS, UNDER_ONE_NORM, root_of_size
from .llama_like import FULL, PLAIN, SLIDING, ByLayer, gpt_like, layer_norm, llama_like, own_keys
from .name_tables import BART_LAYER, IGNORE, gpt_names, megatron, name_table
from .recipes import Recipe, recipe
from .spec import ModelSpec, NormSpec

_LAYER_NORM = NormSpec(kind="layer", eps=1e-5, bias=True)
_EPSILON = partial(layer_norm, key="layer_norm_epsilon")
_GPT_KEYS = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions", "hidden_act": "activation_function",
}  # fmt: skip
_MPT_KEYS = {
    "hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_seq_len",
}  # fmt: skip
_GPT2: Mapping[str, Any] = {
    "max_position_embeddings": 1024, "hidden_act": "gelu_new", "tie_word_embeddings": True,
}  # fmt: skip
_QKV = {"attn.qkv_proj": Stored(name="self_attention.query_key_value", interleaved=True)}
_TRANSPOSED = {
    "attn.qkv_proj": Stored(name="attn.c_attn", transpose=True),
    "attn.o_proj": Stored(name="attn.c_proj", transpose=True),
    "mlp.up_proj": Stored(name="mlp.c_fc", transpose=True),
    "mlp.down_proj": Stored(name="mlp.c_proj", transpose=True),
}


def num_positions(config: HFConfig) -> int:
    """Rows of a learned position embedding."""
    return config.size("max_position_embeddings")


def _scaled_embedding(config: HFConfig) -> float:
    return root_of_size(config) if config.boolean("scale_embedding", True) else 1.0


def _gptj(config: HFConfig) -> ModelSpec:
    head_dim = max(config.size("hidden_size") // config.size("num_attention_heads"), 1)
    config = own_keys(config).replace(
        intermediate_size=config.size("n_inner", 4 * config.size("hidden_size")),
        # The quarter keeps int(head_dim * factor) at rotary_dim, whatever the division rounds to.
        partial_rotary_factor=(config.size("rotary_dim", 64) + 0.25) / head_dim,
    )
    return llama_like(
        config,
        norm=_EPSILON,
        in_pairs=True,
        mlp_bias=True,
        mlp=PLAIN,
        layer=UNDER_ONE_NORM,
        lm_head_bias=True,
    )


def _neox(config: HFConfig, *, rotary_pct: float = 0.25, **options: Any) -> ModelSpec:
    """Keys and values have as many heads as queries, of the hidden size's share, whatever keys a config carries; rope
    alone takes a `head_dim` for theirs, as transformers does."""
    config = config.replace(
        num_key_value_heads=None,
        head_dim=None,
        rope_head_dim=config.get("head_dim"),
        rope_theta=config.get("rotary_emb_base"),
        partial_rotary_factor=config.get("rotary_pct", rotary_pct),
    )
    return llama_like(config, **options)


def _neox_japanese(config: HFConfig) -> ModelSpec:
    attn = {"o_bias": ByLayer([*[False] * (config.num_layers() - 1), True])}
    return _neox(config, rotary_pct=1.0, norm=layer_norm, attn=attn, mlp=PLAIN)


def _neox_names(base: str, tensors: Mapping[str, str | Stored] = NOTHING) -> NameTable:
    modules = {
        **megatron("attention"), "embed_tokens": f"{base}.embed_in", "final_norm": f"{base}.final_layer_norm",
        "lm_head": "embed_out",
    }  # fmt: skip
    ignore = (r"\.attention\.(masked_)?bias$", r"rotary_emb\.inv_freq$", r"^embed_out\.weight$")
    return name_table(modules, tensors=tensors, layer=f"{base}.layers.{{i}}.", base_prefix=f"{base}.", ignore=ignore)


def _four_times(config: HFConfig) -> int:
    return 4 * config.size("hidden_size")


def _gpt2(config: HFConfig, *, num_kv_heads: int = 0, **options: Any) -> ModelSpec:
    if config.get("add_cross_attention"):
        raise ModelError(f"{config.file} asks for cross attention, which gpt2 does not serve")
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    size = config.size("n_inner", 4 * hidden_size)
    config = config.replace(intermediate_size=size)
    scale = (hidden_size // num_heads or 1) ** -0.5 if config.boolean("scale_attn_weights", True) else 1.0
    falls = config.boolean("scale_attn_by_inverse_layer_idx", False)
    scales = ByLayer(scale / (i + 1 if falls else 1) for i in range(config.num_layers()))
    attn = {"scale": scales, "num_kv_heads": num_kv_heads or num_heads}
    return gpt_like(config, norm=_EPSILON, attn=attn, num_learned_positions=num_positions, **options)


def _gpt_bigcode(config: HFConfig) -> ModelSpec:
    """As many KV heads as heads unless `multi_query`."""
    return _gpt2(config, num_kv_heads=1 if config.boolean("multi_query", True) else 0)


def _openai_gpt(config: HFConfig) -> ModelSpec:
    """`afn` names the activation."""
    name = config.text("afn", "gelu")
    name = {"gelu": "gelu_new", "swish": "silu"}.get(name, name)
    config = config.replace(hidden_act=name, n_inner=None, scale_attn_by_inverse_layer_idx=False)
    config = config.replace(scale_attn_weights=True)
    return _gpt2(config, layer={"pre_norm": False, "norm_after_add": True}, final_norm=False)


def _gpt_neo_layers(config: HFConfig) -> list[str]:
    """`attention_types` lists [kinds of layers, how often], `attention_layers` the kind of each."""
    kinds = {"global": FULL, "local": SLIDING}
    listed = config.get("attention_types") or [[["global", "local"], config.num_layers() // 2]]
    if layers := config.texts("attention_layers"):
        listed = [[layers, 1]]
    try:
        return [kinds[name] for names, count in listed for _ in range(count) for name in names]
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"attention_types in {config.file} must list [[kinds], count], got {listed!r}") from error


def _gpt_neo(config: HFConfig) -> ModelSpec:
    if config.get("intermediate_size") is None:
        config = config.replace(intermediate_size=_four_times(config))
    return gpt_like(
        config,
        layer_types=_gpt_neo_layers,
        norm=_EPSILON,
        attn_bias=False,
        attn={"scale": 1.0, "o_bias": True},
        num_learned_positions=num_positions,
    )


def _bloom_scales(config: HFConfig) -> tuple[float, float] | None:
    return (1.0, 1.0) if config.boolean("apply_residual_connection_post_layernorm", False) else None


def _mpt(config: HFConfig) -> ModelSpec:
    """What attention does is in attn_config; only what transformers' class serves is."""
    attn = HFConfig(config.mapping("attn_config"), file=f"attn_config of {config.file}")
    served = {"alibi": True, "qk_ln": False, "attn_type": "multihead_attention", "prefix_lm": False}
    for key, value in served.items():
        if attn.get(key, value) != value:
            raise ModelError(f"{key} in {attn.file} must be {value!r}, got {attn.get(key)!r}")
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    scale = (hidden_size // num_heads or 1) ** -0.5
    return gpt_like(
        config.replace(intermediate_size=config.size("expansion_ratio", 4) * hidden_size),
        norm=partial(_EPSILON, bias=False),
        attn_bias=False,
        mlp_bias=False,
        attn={
            "alibi_max_bias": attn.positive("alibi_bias_max", 8.0),
            "clip_qkv": attn.number("clip_qkv", 0.0, null=0.0),
            "scale": attn.number("softmax_scale", scale, null=scale),
        },
    )


def _falcon(config: HFConfig) -> ModelSpec:
    """Biases of ALiBi are scaled with the scores, as Falcon-RW was trained."""
    config = config.replace(intermediate_size=config.size("ffn_hidden_size", _four_times(config)))
    is_new, num_heads = config.boolean("new_decoder_architecture", False), config.size("num_attention_heads")
    num_kv_heads = 1 if config.boolean("multi_query", True) else num_heads
    if is_new:
        num_kv_heads = config.size("num_kv_heads", num_heads)
    is_parallel = is_new or config.boolean("parallel_attn", True)
    has_two = is_new and config.integer("num_ln_in_parallel_attn", 2) == 2
    has_alibi = config.boolean("alibi", False)
    head_dim = config.size("head_dim", config.size("hidden_size") // num_heads or None)
    return llama_like(
        config.replace(num_key_value_heads=num_kv_heads),
        norm=_EPSILON,
        has_rope="none" if has_alibi else "all",
        mlp=PLAIN,
        attn={"alibi_max_bias": 8.0, "alibi_scale": head_dim**-0.5} if has_alibi else NOTHING,
        attn_bias=flag("bias"),
        mlp_bias=flag("bias"),
        layer={"parallel": is_parallel, "shared_norm": is_parallel and not has_two},
    )


def _chatglm(config: HFConfig, **options: Any) -> ModelSpec:
    """Half of each head is turned in pairs; `rope_ratio` multiplies the base of rope."""
    for key, value in (("rmsnorm", True), ("apply_residual_connection_post_layernorm", False)):
        if config.boolean(key, value) != value:
            raise ModelError(f"{key} in {config.file} must be {value}")
    groups = config.size("multi_query_group_num", 1) if config.boolean("multi_query_attention", False) else None
    config = config.replace(
        num_key_value_heads=groups or config.size("num_attention_heads"), hidden_act="silu",
        rope_theta=10000.0 * config.number("rope_ratio", 1.0), partial_rotary_factor=0.5,
    )  # fmt: skip
    return llama_like(config, **options)


def _opt(config: HFConfig) -> ModelSpec:
    """Token embeddings may be smaller than hidden_size, and are projected then."""
    if config.get("_remove_final_layer_norm"):
        raise ModelError(f"{config.file} asks for a model without its last norm, which is not served")
    config = config.replace(intermediate_size=config.size("ffn_dim", 3072))
    has_affine, bias = config.boolean("layer_norm_elementwise_affine", True), config.boolean("enable_bias", True)
    is_before, hidden_size = config.boolean("do_layer_norm_before", True), config.size("hidden_size")
    embed_size = config.size("word_embed_proj_dim", hidden_size)
    return gpt_like(
        config,
        norm=dataclasses.replace(_LAYER_NORM, weight=has_affine, bias=has_affine),
        attn_bias=bias,
        mlp_bias=bias,
        layer={"pre_norm": is_before, "norm_after_add": not is_before},
        num_learned_positions=num_positions,
        embed_size=0 if embed_size == hidden_size else embed_size,
        final_norm=is_before,
    )


GPT_FAMILIES: Mapping[str, Recipe] = {
    # BioGPT: OPT's layers, scaled embeddings; norms have an epsilon of 1e-5 whatever the config says.
    "biogpt": recipe(
        gpt_like, defaults=dict(max_position_embeddings=1024, hidden_act="gelu", tie_word_embeddings=True),
        names=lambda: name_table(
            dict(
                **BART_LAYER, embed_tokens="biogpt.embed_tokens", final_norm="biogpt.layer_norm",
                embed_positions=Stored(name="biogpt.embed_positions", skip_rows=2), lm_head="output_projection",
            ),
            layer="biogpt.layers.{i}.", base_prefix="biogpt.", ignore=(*IGNORE, r"^output_projection\.weight$"),
        ),
        norm=_LAYER_NORM, num_learned_positions=num_positions, embed_scale=_scaled_embedding,
    ),
    # BLOOM: ALiBi, normalised embeddings, fused qkv, biases everywhere. Any length could be served; `seq_length` is
    # what training saw.
    "bloom": recipe(
        gpt_like,
        keys=dict(
            hidden_size="n_embed", num_hidden_layers="n_layer", num_attention_heads="n_head",
            max_position_embeddings="seq_length",
        ),
        defaults=dict(max_position_embeddings=2048, tie_word_embeddings=True),
        fixed=dict(hidden_act="gelu_new", intermediate_size=_four_times), names=partial(gpt_names, _QKV),
        norm=_EPSILON, attn=dict(alibi_max_bias=8.0), layer=dict(stream_scales=_bloom_scales), embed_norm=True,
    ),
    # ChatGLM 2 and 3, and GLM-4 9B as first published: GLM under Megatron's names.
    "chatglm": recipe(
        _chatglm,
        keys=dict(
            num_hidden_layers="num_layers", intermediate_size="ffn_hidden_size", head_dim="kv_channels",
            vocab_size="padded_vocab_size", max_position_embeddings="seq_length", rms_norm_eps="layernorm_epsilon",
        ),
        names=partial(
            name_table,
            {
                "embed_tokens": "transformer.embedding.word_embeddings", "lm_head": "transformer.output_layer",
                "final_norm": "transformer.encoder.final_layernorm", "attn_norm": "input_layernorm",
                "attn.qkv_proj": "self_attention.query_key_value", "attn.o_proj": "self_attention.dense",
                "mlp_norm": "post_attention_layernorm", "mlp.gate_up_proj": "mlp.dense_h_to_4h",
                "mlp.down_proj": "mlp.dense_4h_to_h",
            },
            layer="transformer.encoder.layers.{i}.",
            base_prefix="transformer.",
            ignore=(r"rotary_pos_emb\.inv_freq$",),
        ),
        rms_norm_eps=1e-5, in_pairs=True, attn_bias=flag("add_bias_linear"), qkv_bias=flag("add_qkv_bias"),
        mlp_bias=flag("add_bias_linear"), final_norm=flag("post_layer_norm", True),
    ),
    # CodeGen 1 and 2: GPT-J with a fused qkv in four groups of query, value and key.
    "codegen": recipe(
        _gptj, keys=_GPT_KEYS, defaults=dict(max_position_embeddings=2048, hidden_act="gelu_new"),
        names=partial(
            gpt_names,
            {"attn.qkv_proj": Stored(name="attn.qkv_proj", interleaved=True, groups=4, order=(0, 2, 1))},
        ),
    ),
    # CTRL (Keskar et al. 2019): GPT-2's layers with sines for positions, scaled embeddings and a bias on the head.
    # Norms of layers have an epsilon of 1e-6, whatever the config says of the last one's.
    "ctrl": recipe(
        gpt_like, keys=_GPT_KEYS,
        defaults=dict(
            max_position_embeddings=256, tie_word_embeddings=True,
            intermediate_size=lambda config: config.size("dff", 8192),
        ),
        fixed=dict(hidden_act="relu"),
        names=gpt_names, norm=NormSpec(kind="layer", eps=1e-6, bias=True), num_learned_positions=num_positions,
        sinusoids="interleaved", embed_scale=root_of_size, lm_head_bias=True,
        final_eps=number("layer_norm_epsilon", 1e-6),
    ),
    # EXAONE 3 and 3.5: Llama under GPT-2's names.
    "exaone": recipe(
        keys=dict(
            num_hidden_layers="num_layers", rms_norm_eps="layer_norm_epsilon", hidden_act="activation_function",
        ),
        defaults=dict(num_key_value_heads=8, max_position_embeddings=4096, rope_theta=500000.0),
        names=partial(gpt_names, ignore=(r"rotary\.inv_freq$",)), rms_norm_eps=1e-5, **FLAGS,
    ),
    # Falcon 7B, 40B, 180B and RW: fused qkv of one or a few KV heads, parallel blocks; RW has ALiBi and is serial.
    "falcon": recipe(
        _falcon, keys=dict(hidden_act="activation"),
        defaults=dict(
            num_hidden_layers=lambda config: config.get("n_layer"),
            num_attention_heads=lambda config: config.get("n_head"),
            max_position_embeddings=2048, hidden_act="gelu", tie_word_embeddings=True,
        ),
        names=partial(gpt_names, _QKV),
    ),
    # GPT-2: layer norms, learned positions, biases everywhere, linears stored as [in_features, out_features].
    "gpt2": recipe(
        _gpt2, keys=_GPT_KEYS, defaults=_GPT2,
        names=partial(gpt_names, _TRANSPOSED),
    ),
    # GPT-BigCode (SantaCoder, StarCoder 1): GPT-2 with one KV head and plain linears.
    "gpt_bigcode": recipe(
        _gpt_bigcode, keys=_GPT_KEYS, defaults=dict(_GPT2, hidden_act="gelu_pytorch_tanh"),
        fixed=dict(scale_attn_by_inverse_layer_idx=False),
        names=partial(gpt_names, {"attn.qkv_proj": Stored(name="attn.c_attn", interleaved=True)}),
    ),
    # GPT-Neo: GPT-2 with plain linears, unscaled scores, and a window in every other layer; only o_proj has a bias in
    # attention.
    "gpt_neo": recipe(
        _gpt_neo,
        keys=dict(
            num_hidden_layers="num_layers", num_attention_heads="num_heads", hidden_act="activation_function",
            sliding_window="window_size",
        ),
        defaults=dict(
            max_position_embeddings=2048, hidden_act="gelu_new", sliding_window=256, tie_word_embeddings=True,
        ),
        names=gpt_names,
    ),
    # GPT-NeoX and Pythia: parallel blocks with a norm each, partial rope, fused qkv. Published files call rope's
    # values rotary_pct and rotary_emb_base.
    "gpt_neox": recipe(
        _neox, defaults=dict(max_position_embeddings=2048, hidden_act="gelu"),
        names=partial(_neox_names, "gpt_neox"), norm=layer_norm, attn_bias=flag("attention_bias", True),
        mlp_bias=True, mlp=PLAIN, layer=dict(parallel=flag("use_parallel_residual", True)),
    ),
    # GPT-NeoX Japanese: GPT-NeoX with serial blocks and no bias but that of the last layer's attention.
    "gpt_neox_japanese": recipe(
        _neox_japanese,
        defaults=dict(
            max_position_embeddings=2048, hidden_act="gelu", tie_word_embeddings=True,
            intermediate_size=lambda c: c.size("hidden_size") * c.size("intermediate_multiple_size", 4),
        ),
        names=partial(_neox_names, "gpt_neox_japanese", {"attn.o_proj.bias": "attention.dense_bias"}),
    ),
    # GPT-J: parallel blocks under one layer norm, partial rope in pairs, a bias on the head. Attention has no biases,
    # all else has.
    "gptj": recipe(
        _gptj, keys=_GPT_KEYS, defaults=dict(max_position_embeddings=2048, hidden_act="gelu_new"),
        names=gpt_names,
    ),
    # MPT: ALiBi, layer norms without biases, fused qkv that may be clipped.
    "mpt": recipe(
        _mpt, keys=_MPT_KEYS,
        defaults=dict(max_position_embeddings=2048, tie_word_embeddings=True), fixed=dict(hidden_act="gelu"),
        names=partial(gpt_names, layer="transformer.blocks.{i}."),
    ),
    # GPT (Radford et al. 2018): GPT-2 with norms after each residual add, and none at the end.
    "openai_gpt": recipe(
        _openai_gpt, keys=_GPT_KEYS, defaults=dict(_GPT2, max_position_embeddings=512),
        names=partial(
            gpt_names,
            dict(**_TRANSPOSED, attn_post_norm="ln_1", mlp_post_norm="ln_2"), ignore=(r"position_ids$",),
        ),
    ),
    # OPT: learned positions that begin in row 2, biases everywhere, relu; the 350M normalises after its blocks.
    "opt": recipe(
        _opt, keys=dict(hidden_act="activation_function"),
        defaults=dict(max_position_embeddings=2048, hidden_act="relu", tie_word_embeddings=True),
        names=lambda: name_table(
            dict(
                **BART_LAYER, embed_tokens="model.decoder.embed_tokens",
                embed_positions=Stored(name="model.decoder.embed_positions", skip_rows=2),
                project_in="model.decoder.project_in", project_out="model.decoder.project_out",
                attn_post_norm="self_attn_layer_norm", mlp_post_norm="final_layer_norm",
                final_norm="model.decoder.final_layer_norm", lm_head="lm_head",
            ),
            layer="model.decoder.layers.{i}.",
        ),
    ),
    # XGLM: a decoder of BART's kind with norms before its blocks and sines for positions, which begin in row 2; all
    # norms have an epsilon of 1e-5.
    "xglm": recipe(
        gpt_like,
        keys=dict(
            hidden_size="d_model", num_hidden_layers="num_layers", num_attention_heads="attention_heads",
            hidden_act="activation_function",
        ),
        defaults=dict(
            max_position_embeddings=2048, hidden_act="gelu", tie_word_embeddings=True,
            intermediate_size=lambda config: config.size("ffn_dim", 4096),
        ),
        names=lambda: name_table(
            dict(
                **BART_LAYER, embed_tokens=Stored(name="model.embed_tokens", copies=("lm_head",)),
                final_norm="model.layer_norm", lm_head="lm_head",
            ),
            ignore=(*IGNORE, r"embed_positions\.weights?$"),
        ),
        norm=_LAYER_NORM, num_learned_positions=num_positions, sinusoids="halves", first_position=2,
        embed_scale=_scaled_embedding,
    ),
}  # fmt: skip
"""model_type -> what sets it apart."""
