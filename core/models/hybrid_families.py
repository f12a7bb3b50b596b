"""Decoders with recurrences, alone or between layers of attention: what readers here make of their configs.

Defaults are those of transformers' config classes. A family that takes more than this is a file in families/.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..errors import ModelError
from ..weights.names import Stored
from .config import HFConfig, flag, number
from .dense_families import ATTN_FLAG, FLAGS, granite_like, olmo2_like
from .hybrids import (
    BACKBONE,
    delta_modules,
    mixer_modules,
    mixer_tensors,
    mixers_alone,
    read_delta,
    read_mamba,
    read_mamba2,
    recurrent_layers,
)
from .latent import latent_like
from .llama_like import FULL, ByLayer, all_slide, layer_norm, llama_like, read_activation, rms_norm
from .mixtures import read_deepseek_experts, read_experts, read_shared, sparse_after, sparse_layers, sparse_steps
from .name_tables import SANDWICH, glu, name_table
from .recipes import Recipe, recipe
from .spec import MixerSpec, ModelSpec, MoeSpec, NormSpec

_AT, _SELF = "linear_attn.", "self_attn."
_BLOCK, _LRU = "temporal_block.", "temporal_block.rg_lru."
_LFM_DEFAULTS = {
    "num_key_value_heads": 8, "max_position_embeddings": 128000, "tie_word_embeddings": True, "rope_theta": 1000000.0,
}  # fmt: skip
_LFM3_KINDS = ("sliding_attention", "conv", "full_attention", "conv")
"""Four layers in a row, where a config lists none; the first of all is a convolution."""
_MAMBA_KEYS = {
    "mamba_d_state": "state_size", "mamba_d_conv": "conv_kernel", "mamba_expand": "expand",
    "mamba_dt_rank": "time_step_rank", "mamba_proj_bias": "use_bias", "mamba_conv_bias": "use_conv_bias",
}  # fmt: skip
_MAMBA2_KEYS = {"mamba_n_heads": "num_heads", "mamba_d_head": "head_dim", "mamba_n_groups": "n_groups"}
_QWEN3_NEXT: Mapping[str, Any] = dict(
    num_key_value_heads=2, head_dim=256, max_position_embeddings=32768, partial_rotary_factor=0.25,
    linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16,
    linear_num_value_heads=32, moe_intermediate_size=512, shared_expert_intermediate_size=512,
)  # fmt: skip
_QWEN3_5: Mapping[str, Any] = dict(
    names={
        f"mixer.{ours}_proj": f"linear_attn.in_proj_{theirs}"
        for ours, theirs in (("qkv", "qkv"), ("z", "z"), ("beta", "b"), ("dt", "a"))
    },
    ignore=(r"^mtp\.",), renames=((r"^model\.language_model\.", "model."),),
)  # fmt: skip


def _alone(config: HFConfig, mixer: Callable[[HFConfig], MixerSpec]) -> ModelSpec:
    return mixers_alone(config, mixer(config))


def _mamba(config: HFConfig, norm: Callable[[HFConfig], NormSpec] | None = None) -> MixerSpec:
    """`intermediate_size` wins over `expand`. norm: of step size, b and c."""
    return read_mamba(config, norm and norm(config), size=config.integer("intermediate_size", 0))


def _mamba2(config: HFConfig, eps: float = 1e-6) -> MixerSpec:
    return read_mamba2(config, rms_norm(config, eps))


def _is_not_listed(config: HFConfig) -> Sequence[bool]:
    attention = config.get("attn_layer_indices") or ()
    if not isinstance(attention, list | tuple):
        raise ModelError(f"attn_layer_indices in {config.file} must be a list of layers, got {attention!r}")
    return [i not in attention for i in range(config.num_layers())]


def _falcon_h1(config: HFConfig, **options: Any) -> ModelSpec:
    """Multipliers everywhere; that of keys is one of scores."""
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    size = config.integer("mamba_d_ssm", 1024, null=0) or int(config.positive("mamba_expand", 2) * hidden_size)
    config = config.replace(mamba_d_head=size // config.size("mamba_n_heads", 128))
    norm = rms_norm(config, 1e-5) if config.boolean("mamba_rms_norm", False) else None
    multipliers = config.numbers("ssm_multipliers", 5) if config.get("ssm_multipliers") else ()
    mixer = dataclasses.replace(
        read_mamba2(config, norm),
        norm_first=config.boolean("mamba_norm_before_gate", True),
        out_bias=config.boolean("projectors_bias", False),
        multipliers=multipliers if set(multipliers) != {1.0} else (),
        in_scale=config.number("ssm_in_multiplier", 1.0),
        out_scale=config.number("ssm_out_multiplier", 1.0),
    )
    gate, down = config.numbers("mlp_multipliers", 2) if config.get("mlp_multipliers") else (1.0, 1.0)
    scale = config.size("head_dim", hidden_size // num_heads or None) ** -0.5 * config.number("key_multiplier", 1.0)
    attn = {
        "scale": scale, "in_scale": number("attention_in_multiplier", 1.0),
        "out_scale": number("attention_out_multiplier", 1.0),
    }  # fmt: skip
    blocks = {"gate_scale": gate, "out_scale": down}
    return llama_like(config, attn=attn, mlp=blocks, layer={"mixer": mixer}, **options)


def _granite_experts(config: HFConfig) -> MoeSpec | None:
    if not config.integer("num_local_experts"):
        return None
    shared = dataclasses.replace(granite_like(config).layers[0].mlp, intermediate_size=_granite_size(config))
    return read_experts(config, size="intermediate_size", shared=shared)


def _granite_size(config: HFConfig) -> int:
    return config.size("shared_intermediate_size", 1024)


def _periodic(config: HFConfig, key: str, period: int, offset: int) -> Sequence[bool]:
    """Layers that a config states by period and offset."""
    period, offset = config.size(f"{key}_layer_period", period), config.integer(f"{key}_layer_offset", offset)
    return [i % period == offset for i in range(config.num_layers())]


def _jamba_mamba(config: HFConfig) -> Sequence[bool]:
    listed = recurrent_layers(config, "layers_block_type")
    return listed or [not flag for flag in _periodic(config, "attn", 8, 4)]


def _jamba_experts(config: HFConfig) -> MoeSpec | None:
    if config.size("num_experts") == 1:
        return None
    return read_experts(config, size="intermediate_size", renormalize=False)


def _jamba_sparse(config: HFConfig) -> Sequence[bool]:
    kinds = config.texts("mlp_layer_types")
    return [kind == "sparse" for kind in kinds] or _periodic(config, "expert", 2, 1)


def _kimi_linear(config: HFConfig, **options: Any) -> ModelSpec:
    """Published files count layers from one, and keep what is linear in an object of its own. No head is tied,
    whatever the config says."""
    linear = HFConfig(config.mapping("linear_attn_config"), file=f"linear_attn_config of {config.file}")
    num_heads = linear.size("num_heads", config.size("linear_num_heads", 32))
    head_dim = linear.size("head_dim", config.size("linear_head_dim", 128))
    width = linear.size("short_conv_kernel_size", config.size("linear_conv_kernel_dim", 4))
    config = config.replace(
        tie_word_embeddings=False, linear_num_key_heads=num_heads, linear_num_value_heads=num_heads,
        linear_key_head_dim=head_dim, linear_value_head_dim=head_dim, linear_conv_kernel_dim=width,
    )  # fmt: skip
    mixer = dataclasses.replace(
        read_delta(config, rms_norm(config, 1e-5)),
        decay_rank=head_dim,
        gate_rank=head_dim,
        gate_activation="sigmoid",
    )
    return latent_like(config, mixer=mixer, is_recurrent=_kimi_layers(config, linear), **options)


def _kimi_layers(config: HFConfig, linear: HFConfig) -> Sequence[bool]:
    num_layers = config.num_layers()
    if listed := recurrent_layers(config, "layer_types"):
        return listed
    if "kda_layers" not in linear or "full_attn_layers" not in linear:
        return [not (i and i % 4 == 0) for i in range(num_layers)]
    kda, full = linear.indices("kda_layers"), linear.indices("full_attn_layers")
    if sorted((*kda, *full)) != list(range(1, num_layers + 1)):
        raise ModelError(
            f"kda_layers and full_attn_layers of {linear.file} must hold each of {num_layers} layers once"
        )
    return [i + 1 in kda for i in range(num_layers)]


def _lfm(config: HFConfig, **options: Any) -> ModelSpec:
    """Short convolutions between two gates; activations are SiLU whatever the config says."""
    bias = config.boolean("conv_bias", False)
    mixer = MixerSpec(
        kind="conv",
        num_heads=config.size("hidden_size"),
        head_dim=1,
        conv_width=config.size("conv_L_cache", 3),
        bias=bias,
        out_bias=bias,
        conv_bias=bias,
    )
    config = config.replace(hidden_act="silu", rms_norm_eps=config.number("norm_eps", 1e-5))
    return llama_like(config, qk_norm="head", mixer=mixer, is_recurrent=_lfm_conv, **options)


def _lfm_conv(config: HFConfig) -> Sequence[bool]:
    attention = config.get("full_attn_idxs")
    listed = recurrent_layers(config, "layer_types")
    return listed or [attention is not None and i not in attention for i in range(config.num_layers())]


def _lfm2(config: HFConfig) -> ModelSpec:
    """The feed-forward size is two thirds of what is stated, rounded up, if `block_auto_adjust_ff_dim`."""
    size = config.size("intermediate_size", 12288)
    if config.boolean("block_auto_adjust_ff_dim", True):
        size, multiple = int(2 * size / 3), config.size("block_multiple_of", 256)
        size = multiple * -(-int(config.number("block_ffn_dim_multiplier", 1.0, null=1.0) * size) // multiple)
    return _lfm(config.replace(intermediate_size=size))


def _lfm3(config: HFConfig, **options: Any) -> ModelSpec:
    kinds = config.texts("layer_types")
    kinds = kinds or tuple(_LFM3_KINDS[i % 4] if i else "conv" for i in range(config.num_layers()))
    config = config.replace(layer_types=list(kinds))
    return _lfm(config, layer_types=[FULL if kind == "conv" else kind for kind in kinds], **options)


def _minimax(config: HFConfig) -> ModelSpec:
    """Lower layers forget faster; each kind of block has a factor of its output and one of the stream."""
    num_heads, num_layers = config.size("num_attention_heads"), config.num_layers()
    head_dim = config.size("head_dim", config.size("hidden_size") // num_heads or None)
    is_linear = recurrent_layers(config, "layer_types") or [i % 2 == 1 for i in range(num_layers)]
    kinds, mlp_alpha = ["linear" if flag else "full" for flag in is_linear], config.number("mlp_alpha_factor", 1.0)
    betas = [config.number(f"{kind}_attn_beta_factor", 1.0) for kind in kinds]
    mixer = MixerSpec(
        kind="lightning",
        num_heads=num_heads,
        activation=read_activation(config, "hidden_act"),
        head_dim=head_dim,
        num_key_heads=num_heads,
        state_size=head_dim,
        norm=NormSpec(eps=1e-6),
        dt_limit=(1.0, 1.0),
    )
    slopes = [1 - i / (num_layers - 1 + 1e-5) + 1e-5 for i in range(num_layers)]
    return llama_like(
        config,
        rms_norm_eps=1e-5,
        layer_types=all_slide,
        attn={"out_scale": ByLayer(betas)},
        moe=partial(read_experts, size="intermediate_size", weight_scale=number("mlp_beta_factor", 1.0)),
        mixer=ByLayer(
            dataclasses.replace(mixer, slope_scale=slope, out_scale=beta)
            for slope, beta in zip(slopes, betas, strict=True)
        ),
        is_recurrent=is_linear,
        layer={
            "stream_scales": ByLayer((config.number(f"{kind}_attn_alpha_factor", 1.0), mlp_alpha) for kind in kinds)
        },
    )


def _olmo_hybrid(config: HFConfig) -> ModelSpec:
    """No rope where `rope_theta` among the rope parameters is null. Norms stand before the blocks of layers with the
    delta rule, and behind those of the others."""
    num_heads, num_layers = config.size("num_attention_heads"), config.num_layers()
    num_key_heads = config.size("linear_num_key_heads", num_heads)
    key_dim = config.size("linear_key_head_dim", int(0.75 * config.size("hidden_size") / num_key_heads))
    config = config.replace(
        linear_num_key_heads=num_key_heads,
        linear_num_value_heads=config.size("linear_num_value_heads", num_heads),
        linear_key_head_dim=key_dim,
        linear_value_head_dim=config.size("linear_value_head_dim", 2 * key_dim),
        linear_conv_kernel_dim=config.size("linear_conv_kernel_dim", 4),
    )
    has_rope = config.mapping("rope_parameters").get("rope_theta", 0.0) is not None
    is_recurrent = recurrent_layers(config, "layer_types") or [
        i % 4 != 3 and (num_layers > 3 or i < num_layers - 1) for i in range(num_layers)
    ]
    scale = 2.0 if config.boolean("linear_allow_neg_eigval", True) else 1.0
    return olmo2_like(
        config if has_rope else config.replace(rope_parameters=None),
        has_rope="all" if has_rope else "none",
        mixer=dataclasses.replace(read_delta(config, NormSpec(eps=1e-5)), beta_scale=scale),
        is_recurrent=is_recurrent,
        layer={"pre_norm": ByLayer(is_recurrent), "post_norm": ByLayer(not one for one in is_recurrent)},
    )


def _qwen3_next_layers(config: HFConfig) -> Sequence[bool]:
    interval = config.size("full_attention_interval", 4)
    listed = recurrent_layers(config, "layer_types")
    return listed or [(i + 1) % interval != 0 for i in range(config.num_layers())]


def _recurrent_gemma(config: HFConfig, **options: Any) -> ModelSpec:
    """Kinds of layers are listed once, and repeated. Embeddings grow by a root in bfloat16."""
    config = config.replace(intermediate_size=config.size("intermediate_size") // 2)
    kinds, hidden_size = config.texts("block_types"), config.size("hidden_size")
    root = math.sqrt(hidden_size)
    step = 2.0 ** (math.frexp(root)[1] - 8)
    mixer = MixerSpec(
        kind="lru",
        num_heads=config.size("lru_width", hidden_size),
        head_dim=1,
        conv_width=config.size("conv1d_width", 4),
        activation=llama_like(config).layers[0].mlp.activation,
        num_blocks=config.size("num_attention_heads"),
        state_size=1,
        bias=True,
        out_bias=True,
    )
    is_recurrent = [kinds[i % len(kinds)] == "recurrent" for i in range(config.num_layers())]
    return llama_like(
        config, mixer=mixer, is_recurrent=is_recurrent, embed_scale=round(root / step) * step, **options
    )


def _rwkv(config: HFConfig) -> ModelSpec:
    """Every `rescale_every` layers the stream is halved, and what later layers add to it besides."""
    hidden_size, every = config.size("hidden_size"), config.get("rescale_every")
    every = config.integer("rescale_every") if every and every > 0 else config.num_layers() + 1
    spec = mixers_alone(
        config,
        MixerSpec(
            kind="wkv",
            num_heads=config.size("attention_hidden_size", hidden_size),
            head_dim=1,
            shift_size=hidden_size,
            mlp_size=config.size("intermediate_size", 4 * hidden_size),
        ),
    )
    layers = tuple(
        dataclasses.replace(
            layer,
            mixer=layer.mixer and dataclasses.replace(layer.mixer, out_scale=0.5 ** (i // every)),
            stream_scale=1.0 if (i + 1) % every else 0.5,
        )
        for i, layer in enumerate(spec.layers)
    )
    norm = layer_norm(config, "layer_norm_epsilon")
    return dataclasses.replace(spec, layers=layers, norm=norm, final_eps=1e-5, embed_norm=True)


_qwen3_next = partial(
    llama_like,
    norm=partial(rms_norm, plus_one=True),
    qk_norm="head",
    attn={"gate_in_query": True},
    mixer=lambda config: read_delta(config, rms_norm(config)),
    is_recurrent=_qwen3_next_layers,
    **ATTN_FLAG,
)
"""The gated delta rule, and gated attention in every fourth layer."""
HYBRID_FAMILIES: Mapping[str, Recipe] = {
    # Bamba: Llama with Mamba-2 in the place of attention but in the layers that are listed, where half of each head
    # turns.
    "bamba": recipe(
        defaults=dict(num_key_value_heads=8, max_position_embeddings=262144, partial_rotary_factor=0.5),
        rms_norm_eps=1e-5, mixer=partial(_mamba2, eps=1e-5),
        is_recurrent=_is_not_listed, **FLAGS,
    ),
    # Falcon-H1: attention and Mamba-2 side by side in each layer.
    "falcon_h1": recipe(
        _falcon_h1, defaults=dict(num_key_value_heads=8, max_position_embeddings=8192),
        rms_norm_eps=1e-5,
        embed_scale=number("embedding_multiplier", 1.0), logit_scale=number("lm_head_multiplier", 1.0), **FLAGS,
    ),
    # Falcon Mamba: Mamba with weightless norms of step size, b and c.
    "falcon_mamba": recipe(
        _alone, keys=_MAMBA_KEYS, names=lambda: HYBRID_FAMILIES["mamba"].names(),
        mixer=partial(_mamba, norm=lambda c: NormSpec(eps=c.number("mixer_rms_eps", 1e-6), weight=False)),
    ),
    # Granite 4: Mamba-2 and attention, with experts beside a shared block, or the shared block alone; rope only if
    # position_embedding_type asks for it.
    "granitemoehybrid": recipe(
        granite_like, defaults=dict(max_position_embeddings=2048, num_local_experts=8, num_experts_per_tok=2),
        mlp=dict(intermediate_size=_granite_size), mixer=_mamba2,
        has_rope=lambda c: "all" if c.get("position_embedding_type") == "rope" else "none",
        is_recurrent=lambda c: recurrent_layers(c, "layer_types", "layers_block_type"), moe=_granite_experts,
        **ATTN_FLAG,
    ),
    # Jamba: Mamba, an attention layer without rope now and then, experts in every other layer.
    "jamba": recipe(
        defaults=dict(
            num_key_value_heads=8, max_position_embeddings=262144, num_experts=16, num_experts_per_tok=2,
        ),
        names={
            **{f"mixer.{name}_norm": f"mamba.{name}_layernorm" for name in ("dt", "b", "c")},
            **{f"mixer.{name}_proj": f"mamba.{name}_proj" for name in ("x", "dt")},
        },
        tensors={"mixer.dt_bias": "mamba.dt_proj.bias"}, has_rope="none",
        mixer=lambda c: read_mamba(c, rms_norm(c)), is_recurrent=_jamba_mamba, moe=_jamba_experts,
        is_sparse=_jamba_sparse,
    ),
    # Kimi Linear: the delta rule with a decay for each value of a key, latent attention without rope, and experts.
    "kimi_linear": recipe(
        _kimi_linear,
        keys=dict(
            max_position_embeddings="model_max_length", norm_topk_prob="moe_renormalize", n_group="num_expert_group",
            num_experts_per_tok="num_experts_per_token", n_shared_experts="num_shared_experts",
        ),
        defaults=dict(
            max_position_embeddings=1048576, moe_intermediate_size=1024, num_experts=256, num_experts_per_tok=8,
            routed_scaling_factor=2.446, n_shared_experts=1, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128,
            qk_rope_head_dim=64, v_head_dim=128,
        ),
        names=delta_modules(_SELF, beta="b", decay_a="f_a", decay_b="f_b", gate_a="g_a", gate_b="g_b"),
        tensors={
            "mixer.a_log": Stored(name=f"{_SELF}A_log", reshape=True),
            "mixer.dt_bias": f"{_SELF}dt_bias",
        },
        renames=((r"\.block_sparse_moe\.", ".mlp."), (r"\.forget_gate\.", ".")),
        rms_norm_eps=1e-5, has_rope="none", moe=read_deepseek_experts, is_sparse=partial(sparse_layers, default=1),
    ),
    # LFM2: short convolutions between two gates, and an attention layer with normalised heads now and then.
    "lfm2": recipe(
        _lfm2, keys=dict(intermediate_size="block_ff_dim", tie_word_embeddings="tie_embedding"),
        defaults=_LFM_DEFAULTS,
    ),
    # LFM2 with experts chosen by sigmoid behind the first dense layers.
    "lfm2_moe": recipe(
        _lfm, keys=dict(tie_word_embeddings="tie_embedding"),
        defaults=dict(
            **_LFM_DEFAULTS, intermediate_size=7168, moe_intermediate_size=1792, num_experts=32,
            num_experts_per_tok=4,
        ),
        moe=partial(
            read_experts, score="sigmoid", renormalize=flag("norm_topk_prob", True),
            weight_scale=number("routed_scaling_factor", 1.0), has_correction=flag("use_expert_bias", True),
        ),
        is_sparse=partial(sparse_after, key="num_dense_layers", default=2),
    ),
    # LFM3: LFM2 with windows, norms around both blocks, and a gate for each head.
    "lfm3": recipe(
        _lfm3,
        defaults=dict(
            **{**_LFM_DEFAULTS, "num_key_value_heads": 4}, head_dim=128, conv_L_cache=7, sliding_window=256,
            rope_parameters=dict(
                sliding_attention=dict(rope_type="default", rope_theta=10000.0),
                full_attention=dict(rope_type="proportional", rope_theta=1000000.0, partial_rotary_factor=0.5),
            ),
        ),
        attn=dict.fromkeys(("gated", "gate_by_head"), flag("use_attention_gate", True)),
        layer=dict(post_norm=flag("use_sandwich_norm", True)), **ATTN_FLAG,
    ),
    # Mamba: a selective state space for each channel, and nothing else.
    "mamba": recipe(
        _alone, keys=_MAMBA_KEYS,
        names=partial(
            name_table, {**BACKBONE, **mixer_modules("mixer.", x_proj="x_proj", dt_proj="dt_proj")},
            layer="backbone.layers.{i}.", tensors=mixer_tensors("mixer.", dt_bias="dt_proj.bias"),
            base_prefix="backbone.",
        ),
        mixer=_mamba,
    ),
    # Mamba-2: a state space with a scalar decay for each head, and nothing else. The first checkpoints spell the
    # embedding in the singular.
    "mamba2": recipe(
        _alone, keys={**_MAMBA_KEYS, **_MAMBA2_KEYS},
        defaults=dict(
            mamba_n_heads=128, mamba_d_head=64, mamba_d_state=128, mamba_n_groups=8, mamba_expand=2,
            tie_word_embeddings=False,
        ),
        names=partial(
            name_table, {**BACKBONE, **mixer_modules("mixer.")}, layer="backbone.layers.{i}.",
            tensors=mixer_tensors("mixer."), base_prefix="backbone.",
            renames=((r"\bembedding\.weight$", "embeddings.weight"),),
        ),
        mixer=lambda c: read_mamba2(c, NormSpec(eps=c.number("layer_norm_epsilon", 1e-5))),
    ),
    # MiniMax-Text-01 and M1: lightning attention in most layers, a stream that goes on behind norms, experts.
    "minimax": recipe(
        _minimax,
        defaults=dict(
            num_key_value_heads=8, max_position_embeddings=131072, hidden_act="silu", rope_theta=1000000.0,
            num_local_experts=8, num_experts_per_tok=2, sliding_window=None,
        ),
        names={
            "mixer.in_proj": Stored(name=f"{_SELF}qkv_proj", interleaved=True), "mixer.out_proj": f"{_SELF}out_proj",
            "mixer.gate_proj": f"{_SELF}output_gate", "mixer.norm": f"{_SELF}norm",
        },
        ignore=(r"\.self_attn\.(slope_rate|(query|key|diagonal)_decay)$",),  # buffers
    ),
    # OLMo Hybrid: OLMo 2's layers, three quarters of which have the gated delta rule.
    "olmo_hybrid": recipe(
        _olmo_hybrid, defaults=dict(max_position_embeddings=65536, rms_norm_eps=1e-6),
        names={
            **SANDWICH, **delta_modules(_AT, z="g", beta="b", dt="a"),
            "attn_norm": "input_layernorm attention_layer_norm",
            **dict.fromkeys(("mlp_norm", "attn_post_norm"), "post_attention_layernorm feedforward_layer_norm"),
        },
    ),
    # Qwen3.5, text only: Qwen3-Next with dense feed-forward blocks and projections stored one by one.
    "qwen3_5_text": recipe(
        _qwen3_next, defaults={**_QWEN3_NEXT, "intermediate_size": 12288, "num_key_value_heads": 4}, **_QWEN3_5,
    ),
    # Qwen3.5 with experts, text only: every layer has them, and their weights sum to one.
    "qwen3_5_moe_text": recipe(
        _qwen3_next,
        defaults=dict(
            **_QWEN3_NEXT, num_experts=256, num_experts_per_tok=8,
            intermediate_size=lambda c: c.size("moe_intermediate_size", 512),
        ),
        moe=partial(read_shared, renormalize=True), **_QWEN3_5,
    ),
    # Qwen3-Next: experts beside a gated shared one; some layers may stay dense.
    "qwen3_next": recipe(
        _qwen3_next, defaults=dict(**_QWEN3_NEXT, intermediate_size=5632, num_experts=512, num_experts_per_tok=10),
        names={
            "mixer.in_proj": Stored(name=f"{_AT}in_proj_qkvz", interleaved=True),
            "mixer.gates_proj": Stored(name=f"{_AT}in_proj_ba", interleaved=True),
        },
        ignore=(r"^mtp\.",),
        moe=partial(read_shared, renormalize=flag("norm_topk_prob", True)), is_sparse=sparse_steps,
    ),
    # RecurrentGemma (Griffin): gated linear recurrences, and an attention layer that slides now and then.
    "recurrent_gemma": recipe(
        _recurrent_gemma, keys=dict(sliding_window="attention_window_size", hidden_act="hidden_activation"),
        defaults=dict(
            max_position_embeddings=8192, sliding_window=2048, hidden_act="gelu_pytorch_tanh",
            partial_rotary_factor=0.5, tie_word_embeddings=True, block_types=["recurrent", "recurrent", "attention"],
        ),
        names={
            "attn_norm": "temporal_pre_norm", "mlp_norm": "channel_pre_norm",
            **glu("mlp", "mlp_block"), **{f"attn.{name}_proj": f"{_BLOCK}{name}_proj" for name in "qkvo"},
            "mixer.conv": f"{_BLOCK}conv_1d", "mixer.y_proj": f"{_BLOCK}linear_y",
            "mixer.x_proj": f"{_BLOCK}linear_x", "mixer.out_proj": f"{_BLOCK}linear_out",
        },
        tensors={
            "mixer.rate": f"{_LRU}recurrent_param",
            "mixer.input_gate.weight": Stored(name=f"{_LRU}input_gate_weight", stacked=True),
            "mixer.input_gate.bias": Stored(name=f"{_LRU}input_gate_bias", reshape=True),
            "mixer.decay_gate.weight": Stored(name=f"{_LRU}recurrent_gate_weight", stacked=True),
            "mixer.decay_gate.bias": Stored(name=f"{_LRU}recurrent_gate_bias", reshape=True),
        },
        layer_types=all_slide, norm=partial(rms_norm, plus_one=True), qkv_bias=flag("attention_bias"), mlp_bias=True,
        attn=dict(o_bias=True), logit_softcap=number("logits_soft_cap", 30.0, null=0.0),
    ),
    # RWKV-4: a weighted mean of values in the place of attention, and blocks that see the token before.
    "rwkv": recipe(
        _rwkv, keys=dict(max_position_embeddings="context_length"),
        defaults=dict(max_position_embeddings=1024, vocab_size=50277, rescale_every=6, tie_word_embeddings=False),
        names=partial(
            name_table,
            {
                "embed_tokens": "rwkv.embeddings", "final_norm": "rwkv.ln_out", "lm_head": "head",
                "embed_norm": "rwkv.blocks.0.pre_ln", "attn_norm": "ln1", "mlp_norm": "ln2",
                "mixer.k_proj": "attention.key", "mixer.v_proj": "attention.value",
                "mixer.gate_proj": "attention.receptance", "mixer.out_proj": "attention.output",
                "mlp.up_proj": "feed_forward.key", "mlp.gate_proj": "feed_forward.receptance",
                "mlp.down_proj": "feed_forward.value",
            },
            layer="rwkv.blocks.{i}.",
            tensors={
                "mixer.a_log": "attention.time_decay", "mixer.bonus": "attention.time_first",
                **{
                    f"{block}.{ours}_mix": Stored(name=f"{at}time_mix_{theirs}", reshape=True)
                    for block, at in (("mixer", "attention."), ("mlp", "feed_forward."))
                    for ours, theirs in (("k", "key"), ("v", "value"), ("gate", "receptance"))
                },
            },
            base_prefix="rwkv.",
        ),
    ),
}  # fmt: skip
"""model_type -> what sets it apart."""
