"""Decoders with experts that are Llama, or what a reader here makes of it, but for what their entries say.

Defaults are those of transformers' config classes. A family that takes more than this is a file in families/.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..errors import ModelError
from ..weights.names import Stored
from .config import HFConfig, flag, number
from .dense_families import (
    ATTN_FLAG,
    EXAONE4,
    FLAGS,
    cohere_like,
    exaone4_like,
    granite_like,
    granite_swa_like,
    hunyuan_like,
    olmo2_like,
    root_of_size,
)
from .llama_like import (
    FULL,
    SLIDING,
    ByLayer,
    all_slide,
    layer_norm,
    llama_like,
    patterned_layer_types,
    windowed_layer_types,
)
from .mixtures import (
    read_biased_experts,
    read_deepseek_experts,
    read_experts,
    read_shared,
    sparse_after,
    sparse_layers,
    sparse_steps,
)
from .name_tables import (
    SANDWICH,
    gpt_names,
    joined_experts,
)
from .recipes import Recipe, recipe
from .spec import MlpSpec, ModelSpec, MoeSpec, NormSpec

_SIZED = partial(read_experts, size="intermediate_size")
_CHOSEN: Mapping[str, Any] = {"renormalize": flag("norm_topk_prob")}
_GRANITE = {"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2}


def _granite_moe(config: HFConfig, base: Callable[..., ModelSpec] = granite_like) -> ModelSpec:
    """Experts have `intermediate_size`; a shared one has `shared_intermediate_size`, if any."""
    size = config.integer("shared_intermediate_size", 0)
    moe = _SIZED(config)
    if size:
        moe = dataclasses.replace(moe, shared=MlpSpec(intermediate_size=size, activation=moe.activation))
    return base(config, moe=moe, **ATTN_FLAG)


def _dbrx(config: HFConfig) -> ModelSpec:
    """Sizes of attention and of experts stand in objects of their own."""
    attn = HFConfig(config.mapping("attn_config"), file=f"attn_config of {config.file}")
    ffn = HFConfig(config.mapping("ffn_config"), file=f"ffn_config of {config.file}")
    power = ffn.number("moe_normalize_expert_weights", 1.0, null=0.0)
    if power not in (0.0, 1.0):
        raise ModelError(f"moe_normalize_expert_weights in {ffn.file} must be 1 or null")
    config = config.replace(
        head_dim=None,
        num_key_value_heads=attn.size("kv_n_heads", 1),
        intermediate_size=ffn.size("ffn_hidden_size", 3584),
        num_experts=ffn.size("moe_num_experts", 4),
        num_experts_per_tok=ffn.size("moe_top_k", 1),
        hidden_act=HFConfig(ffn.mapping("ffn_act_fn"), file=f"ffn_act_fn of {ffn.file}").text("name", "silu"),
        rope_theta=config.get("rope_theta") or attn.get("rope_theta") or 10000.0,
    )
    return llama_like(
        config,
        norm=NormSpec(kind="layer", eps=1e-5),
        attn={"clip_qkv": attn.number("clip_qkv", 0.0, null=0.0)},
        moe=_SIZED(config, renormalize=power == 1.0),
    )


def _cohere2_moe(config: HFConfig) -> ModelSpec:
    """Scores are softmax or sigmoid; routed and shared experts are added, or averaged."""
    is_sparse, num_shared = sparse_layers(config), config.integer("num_shared_experts", 0)
    first, period = config.size("prefix_dense_sliding_window_pattern", 1), config.size("sliding_window_pattern", 4)
    num_dense = config.integer("first_k_dense_replace", 0)
    periods = [first] * num_dense + [period] * (len(is_sparse) - num_dense)
    places = [*range(num_dense), *range(len(is_sparse) - num_dense)]
    kinds = config.texts("layer_types") or [
        SLIDING if (place + 1) % every else FULL for place, every in zip(places, periods, strict=True)
    ]
    has_window = config.integer("sliding_window", null=0) > 0
    eps, size = config.number("rms_norm_eps", 0.0, null=0.0), config.size("intermediate_size")
    averages = num_shared and config.text("shared_expert_combination_strategy", "average") == "average"
    score, scale = config.text("expert_selection_fn", "softmax"), 0.5 if averages else 1.0
    moe = _SIZED(
        config,
        score="sigmoid" if score == "sigmoid" else "softmax",
        renormalize=score == "softmax" or config.boolean("norm_topk_prob", True),
        weight_scale=scale,
        shared=MlpSpec(intermediate_size=size * num_shared, out_scale=scale) if num_shared else None,
    )
    return cohere_like(
        config,
        layer_types=kinds,
        norm=NormSpec(eps=eps) if eps else partial(layer_norm, bias=False),
        mlp={"intermediate_size": config.size("prefix_dense_intermediate_size", size)},
        moe=moe,
        is_sparse=is_sparse,
        has_rope=[
            (kind == SLIDING and has_window) or (first == 1 and not sparse)
            for kind, sparse in zip(kinds, is_sparse, strict=False)
        ],
    )


def _aria_experts(config: HFConfig) -> MoeSpec:
    """`hidden_act` is the shared block's; experts know SiLU alone."""
    size = config.size("intermediate_size") * config.size("moe_num_shared_experts", 2)
    shared = MlpSpec(intermediate_size=size, bias=config.boolean("mlp_bias", False))
    return dataclasses.replace(_SIZED(config, shared=shared), activation="silu")


def _ernie(config: HFConfig) -> ModelSpec:
    bias, num_layers = config.boolean("use_bias", False), config.num_layers()
    size, num_shared = config.size("moe_intermediate_size"), config.integer("moe_num_shared_experts", 2, null=0)
    shared = MlpSpec(intermediate_size=size * num_shared, bias=bias) if num_shared else None
    if config.number("moe_norm_min", 0.0) > 1e-9:
        raise ModelError(f"moe_norm_min in {config.file} must be at most 1e-9, got {config['moe_norm_min']}")
    first, interval = config.integer("moe_layer_start_index", 1), config.size("moe_layer_interval", 1)
    stated = config.get("moe_layer_end_index", -1)
    last = num_layers - 1 if stated in (-1, None) else config.integer("moe_layer_end_index")
    return llama_like(
        config,
        rms_norm_eps=1e-5,
        in_pairs=True,
        attn_bias=bias,
        mlp_bias=bias,
        moe=read_experts(config, has_correction=True, shared=shared),
        is_sparse=[first <= i <= last and (i + 1) % interval == 0 for i in range(num_layers)],
        lm_head_bias=bias,
    )


def _gpt_oss(config: HFConfig) -> ModelSpec:
    """Experts in MXFP4 become dense while they are read (weights/formats/mxfp4.py)."""
    return llama_like(
        config,
        layer_types=patterned_layer_types(config, 2),
        rms_norm_eps=1e-5,
        attn_bias=flag("attention_bias", True),
        attn={"sinks": True},
        moe=partial(
            _SIZED,
            router_bias=True,
            bias=True,
            clamp=config.positive("swiglu_limit", 7.0),
            alpha=number("swiglu_alpha", 1.702),
        ),
    )


def _hunyuan(config: HFConfig) -> ModelSpec:
    """`num_experts` and `moe_topk` may be lists with a number for each layer, all equal."""
    for key in ("num_experts", "num_experts_per_tok"):
        values = config.get(key)
        if isinstance(values, list):
            if len(set(map(str, values))) != 1:
                raise ModelError(f"{key} in {config.file} differs from layer to layer, which is not served: {values}")
            config = config.replace(**{key: values[0]})
    moe = _SIZED(config)
    shared = MlpSpec(intermediate_size=moe.intermediate_size, activation=moe.activation)
    return hunyuan_like(config, moe=dataclasses.replace(moe, shared=shared))


def _minimax_m2(config: HFConfig) -> ModelSpec:
    if config.get("rotary_dim"):
        # The quarter keeps int(head_dim * factor) at rotary_dim, whatever the division rounds to.
        factor = (config.size("rotary_dim") + 0.25) / config.size("head_dim")
        config = config.with_defaults(partial_rotary_factor=min(factor, 1.0))
    moe = _SIZED(config, score="sigmoid", has_correction=True)
    return llama_like(config, qk_norm="all", moe=moe)


def _phimoe(config: HFConfig) -> ModelSpec:
    """The epsilon of its layer norms is called rms_norm_eps."""
    scaling = dict(config.mapping("rope_scaling") or config.mapping("rope_parameters"))
    short, long = scaling.get("short_mscale"), scaling.get("long_mscale")
    if short is not None:
        if short != long:
            raise ModelError(f"short_mscale ({short}) and long_mscale ({long}) in {config.file} must be equal")
        scaling = {"rope_theta": config.get("rope_theta"), **scaling, "attention_factor": short}
        config = config.replace(rope_scaling=None, rope_parameters=scaling)
    return llama_like(
        config,
        layer_types=all_slide,
        norm=partial(layer_norm, key="rms_norm_eps"),
        moe=_SIZED(config, score="sparsemixer", renormalize=False),
        lm_head_bias=flag("lm_head_bias"),
        **ATTN_FLAG,
    )


def _flint_layers(config: HFConfig) -> Sequence[str]:
    num_layers = config.num_layers()
    return config.texts("layer_types") or [
        FULL if i < 2 or i % 4 == 1 or i == num_layers - 1 else SLIDING for i in range(num_layers)
    ]


def _qwen2_layers(config: HFConfig) -> Sequence[str]:
    """Every other layer below `max_window_layers` slides, if `use_sliding_window`; or as listed."""
    slides, first_full = _qwen3_layers(config), config.integer("max_window_layers")
    return config.texts("layer_types") or [
        FULL if i % 2 or i >= first_full else kind for i, kind in enumerate(slides)
    ]


def _qwen3_layers(config: HFConfig) -> Sequence[str]:
    slides = config.boolean("use_sliding_window", False) and config.integer("sliding_window", null=0) > 0
    return [SLIDING if slides else FULL] * config.num_layers()


def _glm4_moe(config: HFConfig) -> ModelSpec:
    norms_heads = config.boolean("use_qk_norm", False)
    return llama_like(
        config,
        rms_norm_eps=1e-5,
        qk_norm="head" if norms_heads else None,
        qkv_bias=flag("attention_bias"),
        moe=read_deepseek_experts,
        is_sparse=partial(sparse_after, default=1),
    )


def _laguna(config: HFConfig) -> ModelSpec:
    """Llama with those; a gate is one number for each head unless `gating` is per-element."""
    if config.boolean("moe_apply_router_weight_on_input", False):
        raise ModelError(f"moe_apply_router_weight_on_input in {config.file} must be false")
    attn: dict[str, Any] = {
        "gated": True,
        "gate_by_head": config.get("gating", True) in (True, "per-head"),
        "gate_activation": "softplus",
    }
    if config.get("num_attention_heads_per_layer"):
        attn["num_heads"] = _laguna_heads(config)
    shared = MlpSpec(intermediate_size=config.size("shared_expert_intermediate_size", 512))
    moe = read_experts(
        config,
        score="sigmoid",
        has_correction=True,
        weight_scale=config.number("moe_routed_scaling_factor", 1.0),
        router_softcap=config.number("moe_router_logit_softcapping", 0.0),
        shared=shared,
    )
    return llama_like(
        config,
        layer_types=lambda config: config.texts("layer_types"),
        qk_norm="head",
        attn=attn,
        moe=moe,
        is_sparse=partial(sparse_layers, default=1),
        **ATTN_FLAG,
    )


def _laguna_heads(config: HFConfig) -> ByLayer:
    heads, num_kv_heads = config.indices("num_attention_heads_per_layer"), config.size("num_key_value_heads")
    if len(heads) != config.num_layers() or any(not n or n % num_kv_heads for n in heads):
        raise ModelError(f"num_attention_heads_per_layer in {config.file} must list multiples of num_key_value_heads")
    return ByLayer(heads)


def _mimo(config: HFConfig) -> ModelSpec:
    """o_proj never has a bias."""
    config = config.replace(n_shared_experts=None)
    if config.get("sliding_window_size") is not None:
        config = config.replace(sliding_window=config.size("sliding_window_size") + 1)
    num_layers, scale = config.num_layers(), config.number("routed_scaling_factor", 1.0, null=1.0)
    kinds = config.texts("layer_types") or [SLIDING if i and (i + 1) % 6 else FULL for i in range(num_layers)]
    slides = [kind == SLIDING and config.integer("sliding_window") > 0 for kind in kinds]
    num_kv_heads = config.size("num_key_value_heads", config.size("num_attention_heads"))
    head_dim, value_dim = config.size("head_dim"), config.size("v_head_dim", 128)
    return llama_like(
        config,
        layer_types=kinds,
        rms_norm_eps=1e-5,
        qkv_bias=flag("attention_bias"),
        attn={
            "num_kv_heads": ByLayer(num_kv_heads * (2 if one else 1) for one in slides),
            "sinks": ByLayer(slides),
            "head_dim": max(head_dim, value_dim),
            "qk_head_dim": head_dim if head_dim < value_dim else 0,
            "v_head_dim": value_dim if value_dim < head_dim else 0,
            "out_scale": number("attention_value_scale", 0.707, null=1.0),
        },
        moe=read_deepseek_experts(config.replace(routed_scaling_factor=scale)),
        is_sparse=partial(sparse_layers, default=1),
    )


_qwen3_moe = partial(
    llama_like,
    layer_types=_qwen3_layers,
    qk_norm="head",
    attn_bias=flag("attention_bias"),
    moe=partial(read_experts, renormalize=flag("norm_topk_prob")),
    is_sparse=sparse_steps,
)
MIXTURE_FAMILIES: Mapping[str, Recipe] = {
    # Trinity (AFMoE): gated attention, four norms a layer, rope in sliding layers only, experts by sigmoid whose
    # weights always sum to route_scale.
    "afmoe": recipe(
        keys=dict(n_shared_experts="num_shared_experts", routed_scaling_factor="route_scale"),
        defaults=dict(
            head_dim=128, max_position_embeddings=16384, sliding_window=1024, moe_intermediate_size=1408,
            num_experts=64, num_experts_per_tok=6, n_shared_experts=2,
        ),
        names=SANDWICH, layer_types=lambda c: patterned_layer_types(c, c.size("global_attn_every_n_layers", 4)),
        rms_norm_eps=1e-5, qk_norm="head", has_rope="sliding", attn=dict(gated=True), layer=dict(post_norm=True),
        moe=partial(read_deepseek_experts, renormalize=True, num_groups=1, num_groups_per_token=1),
        is_sparse=partial(sparse_after, key="num_dense_layers", default=1),
        embed_scale=lambda c: root_of_size(c) if c.boolean("mup_enabled", False) else 1.0, **ATTN_FLAG,
    ),
    # The language model of Aria: Llama with experts beside shared ones.
    "aria_text": recipe(
        keys=dict(num_experts="moe_num_experts"),
        defaults=dict(max_position_embeddings=2048, intermediate_size=4096, num_experts=8),
        fixed=dict(num_experts_per_tok=lambda c: c.size("moe_topk", 2)),
        tensors={
            f"mlp.experts.{ours}.weight": Stored(
                name=f"mlp.experts.{theirs}.weight", also=(f"mlp.experts.{ours}",), transpose=True, stacked=True
            )
            for ours, theirs in (("gate_up_proj", "fc1"), ("down_proj", "fc2"))
        },
        moe=_aria_experts, **ATTN_FLAG,
    ),
    # Command A with experts: Command A whose first layers may be dense, and are turned though they see everything.
    "cohere2_moe": recipe(
        _cohere2_moe, defaults=dict(head_dim=128, sliding_window=4096, num_experts=8, num_experts_per_tok=2),
        fixed=dict(rope_scaling=None),
    ),
    # DBRX: layer norms without bias, fused qkv that is cut, and experts of which a layer keeps all in three matrices.
    "dbrx": recipe(
        _dbrx,
        keys=dict(
            hidden_size="d_model", num_hidden_layers="n_layers", num_attention_heads="n_heads",
            max_position_embeddings="max_seq_len",
        ),
        defaults=dict(max_position_embeddings=2048),
        names=partial(
            gpt_names,
            {
                "attn_norm": "norm_attn_norm.norm_1",
                "attn.qkv_proj": "norm_attn_norm.attn.Wqkv", "attn.o_proj": "norm_attn_norm.attn.out_proj",
                "mlp_norm": "norm_attn_norm.norm_2", "mlp.router": "ffn.router.layer",
            },
            tensors={
                f"mlp.experts.{{j}}.{ours}_proj.weight": Stored(
                    name=f"ffn.experts.mlp.{theirs}", share=True, transpose=ours == "down"
                )
                for ours, theirs in (("gate", "w1"), ("up", "v1"), ("down", "w2"))
            },
            layer="transformer.blocks.{i}.",
        ),
    ),
    # dots.llm1: normalised heads, DeepSeek-V3's experts after the first dense layers.
    "dots1": recipe(
        defaults=dict(
            num_key_value_heads=32, max_position_embeddings=2048, moe_intermediate_size=1408, norm_topk_prob=False,
            sliding_window=4096, max_window_layers=62,
        ),
        layer_types=windowed_layer_types, qk_norm="head",
        moe=read_deepseek_experts, is_sparse=sparse_after, **ATTN_FLAG,
    ),
    # ERNIE 4.5 MoE: Llama with interleaved rope, and experts by softmax with a correction beside shared ones; layers
    # and heads that predict more tokens are not read.
    "ernie4_5_moe": recipe(
        _ernie, keys=dict(num_experts="moe_num_experts", num_experts_per_tok="moe_k"),
        defaults=dict(
            num_key_value_heads=4, max_position_embeddings=131072, rope_theta=500000.0, tie_word_embeddings=True,
            moe_intermediate_size=1536, num_experts=64, num_experts_per_tok=6,
        ),
        tensors={"mlp.router.correction": Stored(name="mlp.moe_statics.e_score_correction_bias", stacked=True)},
        ignore=(r"\.mtp_",),
    ),
    # K-EXAONE: EXAONE 4 with norms before the blocks, and DeepSeek-V3's experts after the first dense layer. The
    # layer that predicts a second token is left out.
    "exaone_moe": recipe(
        exaone4_like, keys=dict(n_shared_experts="num_shared_experts"),
        defaults=dict(
            **EXAONE4, moe_intermediate_size=1024, num_experts=64, num_experts_per_tok=8, n_shared_experts=1,
            routed_scaling_factor=2.5,
        ),
        ignore=(r"^mtp\.",), layer={}, moe=read_deepseek_experts, is_sparse=partial(sparse_layers, default=1),
    ),
    # FlexOlmo: OLMo 2 with experts.
    "flex_olmo": recipe(
        lambda config: olmo2_like(config, rms_norm_eps=1e-6, moe=_SIZED(config, **_CHOSEN)),
        defaults=dict(max_position_embeddings=4096, rope_theta=500000.0, num_experts=7, num_experts_per_tok=5),
        names=SANDWICH,
    ),
    # Flint: Qwen3-MoE with sinks, sigmoid scores, a shared expert, and rope in sliding layers only.
    "flint": recipe(
        defaults=dict(
            num_key_value_heads=4, head_dim=128, max_position_embeddings=262144, sliding_window=513,
            moe_intermediate_size=512, num_experts=256, num_experts_per_tok=6, mlp_only_layers=[0, 1],
            shared_expert_intermediate_size=1024,
        ),
        fixed=dict(mlp_only_layers=lambda c: [0, 1] if c.get("mlp_only_layers") is None else c["mlp_only_layers"]),
        layer_types=_flint_layers, qk_norm="head", has_rope="sliding", attn=dict(sinks=True),
        moe=partial(
            read_experts, score="sigmoid", renormalize=flag("norm_topk_prob", True),
            shared=lambda c: MlpSpec(intermediate_size=c.size("shared_expert_intermediate_size", 1024)),
        ),
        is_sparse=sparse_steps, **ATTN_FLAG,
    ),
    # GLM-4.5 and 4.6: partial rope, normalised heads in the large one, DeepSeek-V3's experts; o_proj has no bias. The
    # layer that predicts a second token is left out.
    "glm4_moe": recipe(
        _glm4_moe,
        defaults=dict(
            num_key_value_heads=8, max_position_embeddings=131072, partial_rotary_factor=0.5,
            moe_intermediate_size=1408, num_experts_per_tok=8, n_shared_experts=1, n_routed_experts=128,
            num_nextn_predict_layers=1,
        ),
    ),
    # gpt-oss: attention sinks, biases everywhere, experts with a clamped gate, every other layer slides.
    "gpt_oss": recipe(
        _gpt_oss,
        defaults=dict(
            num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, sliding_window=128,
            num_local_experts=128, num_experts_per_tok=4, rope_theta=150000.0,
            rope_parameters=dict(
                rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                original_max_position_embeddings=4096,
            ),
        ),
        tensors={
            **joined_experts("mlp.experts.", transpose=True),
            "mlp.experts.gate_up_proj.weight": Stored(
                name="mlp.experts.gate_up_proj", transpose=True, stacked=True, interleaved=True,
            ),
            "mlp.experts.gate_up_proj.bias": Stored(
                name="mlp.experts.gate_up_proj_bias", stacked=True, interleaved=True,
            ),
            "mlp.experts.down_proj.bias": Stored(name="mlp.experts.down_proj_bias", stacked=True),
        },
    ),
    # Granite 3 MoE: Granite with experts, stored as one tensor.
    "granitemoe": recipe(
        lambda config: granite_like(config, moe=_SIZED, **ATTN_FLAG), defaults=_GRANITE,
    ),
    # Granite 3 MoE with a shared expert; a size of 0 shares nothing.
    "granitemoeshared": recipe(_granite_moe, defaults=_GRANITE),
    # Granite SWA with experts: Granite MoE with what Granite SWA adds.
    "granitemoe_swa": recipe(
        _granite_moe, defaults=dict(_GRANITE, sliding_window=128), base=granite_swa_like,
    ),
    # Hunyuan A13B: Hunyuan with experts and a shared one of the same size.
    "hunyuan_v1_moe": recipe(
        _hunyuan, keys=dict(num_experts_per_tok="moe_topk"), defaults=dict(num_experts=1, num_experts_per_tok=1),
    ),
    # Hunyuan 3: normalised heads, experts by sigmoid with a correction after the first dense layer. The layer that
    # predicts a second token is left out.
    "hy_v3": recipe(
        keys=dict(n_shared_experts="num_shared_experts", routed_scaling_factor="router_scaling_factor"),
        defaults=dict(
            num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, rope_theta=11158840.0,
            moe_intermediate_size=1536, num_experts=192, num_experts_per_tok=8, n_shared_experts=1,
            routed_scaling_factor=2.826, num_nextn_predict_layers=1,
        ),
        fixed=dict(norm_topk_prob=True, n_group=None, topk_group=None),
        rms_norm_eps=1e-5, qk_norm="head", moe=read_biased_experts, is_sparse=partial(sparse_layers, default=1),
        **FLAGS,
    ),
    # Laguna: experts by sigmoid, gated attention, and a number of heads of each layer's own.
    "laguna": recipe(
        _laguna,
        defaults=dict(
            num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, sliding_window=512,
            moe_intermediate_size=512, num_experts=256, num_experts_per_tok=8,
            rope_parameters={
                FULL: dict(rope_type="default", rope_theta=500000.0, partial_rotary_factor=0.5),
                SLIDING: dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=1.0),
            },
        ),
    ),
    # Mellum 2: Qwen3-MoE with a window and a rope for each type of layer; full layers and experts where the config
    # lists no types.
    "mellum": recipe(
        defaults=dict(
            num_key_value_heads=4, head_dim=128, max_position_embeddings=131072, sliding_window=1024,
            moe_intermediate_size=896, num_experts=64, num_experts_per_tok=8,
            rope_parameters={
                FULL: dict(rope_type="default", rope_theta=500000.0),
                SLIDING: dict(rope_type="default", rope_theta=10000.0),
            },
        ),
        fixed=dict(partial_rotary_factor=None),
        ignore=(r"^mtp\.",), layer_types=lambda config: config.texts("layer_types"), qk_norm="head",
        moe=partial(read_experts, renormalize=flag("norm_topk_prob", True)), is_sparse=sparse_layers, **ATTN_FLAG,
    ),
    # MiMo-V2-Flash: experts by sigmoid, values smaller than keys, and sinks and more KV heads in sliding layers.
    "mimo_v2_flash": recipe(
        _mimo,
        defaults=dict(
            num_key_value_heads=4, head_dim=192, max_position_embeddings=131072, sliding_window=129,
            moe_intermediate_size=2048, num_experts_per_tok=8, n_routed_experts=256,
            rope_parameters={
                FULL: dict(rope_type="default", rope_theta=5000000.0, partial_rotary_factor=0.334),
                SLIDING: dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.334),
            },
        ),
        ignore=(r"^model\.mtp\.",),
    ),
    # MiniMax-M2: experts by sigmoid with a correction, a norm over all heads of query and key, partial rope;
    # published files say `rotary_dim`.
    "minimax_m2": recipe(
        _minimax_m2, keys=dict(num_nextn_predict_layers="num_mtp_modules"),
        defaults=dict(
            num_key_value_heads=8, head_dim=128, max_position_embeddings=196608, rope_theta=5000000.0,
            num_local_experts=256, num_experts_per_tok=8,
        ),
    ),
    # Mixtral 8x7B and 8x22B: Mistral with experts; all layers slide if `sliding_window` is set.
    "mixtral": recipe(
        defaults=dict(
            num_key_value_heads=8, max_position_embeddings=131072, sliding_window=None, rope_theta=1000000.0,
            num_local_experts=8, num_experts_per_tok=2,
        ),
        layer_types=all_slide, rms_norm_eps=1e-5, moe=_SIZED,
    ),
    # OLMoE: experts, a norm over all heads of query and key, values that may be clipped.
    "olmoe": recipe(
        defaults=dict(max_position_embeddings=4096, num_experts=64, num_experts_per_tok=8),
        rms_norm_eps=1e-5, qk_norm="all", attn=dict(clip_qkv=number("clip_qkv", 0.0, null=0.0)),
        moe=partial(_SIZED, **_CHOSEN), **ATTN_FLAG,
    ),
    # Phi-3.5-MoE: layer norms, experts by sparse mixer, LongRoPE with stated attention factors.
    "phimoe": recipe(
        _phimoe,
        defaults=dict(
            num_key_value_heads=8, max_position_embeddings=131072, sliding_window=None, rope_theta=1000000.0,
            num_local_experts=16,
        ),
        fixed=dict(num_experts_per_tok=2),
    ),
    # Qwen1.5-MoE and Qwen2-57B-A14B: Qwen2 with experts and a gated shared one; some layers may stay dense.
    "qwen2_moe": recipe(
        defaults=dict(
            num_key_value_heads=16, max_position_embeddings=32768, sliding_window=4096, max_window_layers=28,
            moe_intermediate_size=1408, shared_expert_intermediate_size=5632, num_experts=60, num_experts_per_tok=4,
        ),
        layer_types=_qwen2_layers, qkv_bias=flag("qkv_bias", True),
        moe=partial(read_shared, **_CHOSEN), is_sparse=sparse_steps,
    ),
    # Qwen3-30B-A3B and 235B-A22B: Qwen3 with experts; head_dim is hidden_size / num_heads unless stated.
    "qwen3_moe": recipe(
        _qwen3_moe,
        defaults=dict(
            num_key_value_heads=4, max_position_embeddings=32768, sliding_window=4096, moe_intermediate_size=768,
            num_experts=128, num_experts_per_tok=8,
        ),
    ),
    # The language model of Qwen3-VL with experts: Qwen3-MoE with experts stored in one tensor a layer.
    "qwen3_vl_moe_text": recipe(
        _qwen3_moe, fixed=dict(norm_topk_prob=True, use_sliding_window=False),
        defaults=dict(
            num_key_value_heads=16, max_position_embeddings=128000, rope_theta=500000.0, moe_intermediate_size=1408,
            num_experts=60, num_experts_per_tok=4, tie_word_embeddings=True,
        ),
        tensors=joined_experts("mlp.experts.", transpose=True),
    ),
    # Sarvam 30B: GLM-4.5 with normalised heads that rope turns whole, and with names of its own.
    "sarvam_moe": recipe(
        _glm4_moe,
        keys=dict(
            n_routed_experts="num_experts", n_shared_experts="num_shared_experts", attention_bias="use_qkv_bias",
        ),
        defaults=dict(
            num_key_value_heads=4, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-6,
            rope_theta=8000000.0, moe_intermediate_size=1024, num_experts_per_tok=6, n_shared_experts=1,
            n_routed_experts=128, routed_scaling_factor=2.5, use_qk_norm=True, num_nextn_predict_layers=0,
        ),
    ),
}  # fmt: skip
"""model_type -> what sets it apart."""
