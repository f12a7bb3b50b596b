"""What most families share with Llama: the spec read from a config."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from ..errors import ModelError
from ..suggest import did_you_mean
from .config import NOTHING, HFConfig, Read, flag, read, read_all
from .spec import (
    NO_ATTENTION,
    Activation,
    AttentionSpec,
    LayerSpec,
    MixerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormOver,
    NormSpec,
    RopeScaling,
    RopeSpec,
)

ACTIVATIONS: Mapping[str, Activation] = {
    **{name: name for name in get_args(Activation) if name != "softplus"},
    "swish": "silu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh", "gelu_python_tanh": "gelu_tanh", "gelu_python": "gelu",
}  # fmt: skip
"""Activation functions as configs spell them."""

PLAIN: Mapping[str, Any] = {"gated": False}
"""A feed-forward block without a gate."""
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
TURN_A_PART = frozenset(
    "bamba chatglm codegen glm glm4 glm4_moe glm4_moe_lite glm4v_moe_text glm4v_text glm_ocr_text gpt_neox "
    "gpt_neox_japanese gptj laguna mellum mimo_v2_flash minimax_m2 nemotron nomic_bert persimmon phi phi3 "
    "qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma sarvam_moe solar_open stablelm".split()
)
"""Model types whose rope heeds `partial_rotary_factor`. transformers' classes of all others turn whole heads,
whatever config.json says; llama.cpp's code heeds it always."""


class ByLayer(tuple[Any, ...]):
    """A value of a field for each layer."""

    __slots__ = ()


def at_layer(fields: Mapping[str, Any], layer_idx: int) -> dict[str, Any]:
    """The fields of one layer."""
    return {name: value[layer_idx] if isinstance(value, ByLayer) else value for name, value in fields.items()}


def llama_like(
    config: HFConfig,
    *,
    layer_types: Read[Sequence[str]] = (),
    activation_key: str = "hidden_act",
    rms_norm_eps: float = 1e-6,
    norm: Read[NormSpec | None] = None,
    attn_bias: Read[bool] = False,
    qkv_bias: Read[bool] = False,
    mlp_bias: Read[bool] = False,
    qk_norm: Read[NormOver | None] = None,
    in_pairs: bool = False,
    backwards: bool = False,
    has_rope: Read[Literal["all", "none", "sliding"] | Sequence[bool]] = "all",
    moe: Read[MoeSpec | None] = None,
    is_sparse: Read[Sequence[bool]] = (),
    mixer: Read[MixerSpec | ByLayer | None] = None,
    is_recurrent: Read[Sequence[bool]] = (),
    attn: Mapping[str, Any] = NOTHING,
    mlp: Mapping[str, Any] = NOTHING,
    layer: Mapping[str, Any] = NOTHING,
    **model: Any,
) -> ModelSpec:
    """The spec of Llama with this config's sizes: RMS norms before attention and feed-forward, gated SiLU, rope.

    All else says how a family differs, each a value or a function of the config (`flag`, `number`). layer_types:
    FULL, SLIDING with the config's `sliding_window` or CHUNKED with its `attention_chunk_size` for each layer; empty:
    all full. norm: other norms.
    attn_bias: on all four projections of attention; qkv_bias: on query, key and value; mlp_bias: on those of
    feed-forward blocks. qk_norm: query and key are normalised as the stream is, over that. in_pairs: rope turns
    neighbours, as GPT-J's; backwards: the other way. has_rope: which layers turn heads. moe: experts in the place of
    feed-forward blocks, in all layers or where is_sparse says so; mixer, is_recurrent: likewise a recurrence in that
    of attention. attn, mlp, layer, model: fields of the specs of layers, for all or `ByLayer`, and of the model.
    Raises ModelError for a missing or impossible value.
    """
    config = config.with_defaults(**{activation_key: "silu"})
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    num_layers = config.num_layers()
    num_kv_heads = config.size("num_key_value_heads", num_heads)
    head_dim = config.size("head_dim", hidden_size // num_heads or None)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"num_attention_heads ({num_heads}) in {config.file} is no multiple of "
            f"num_key_value_heads ({num_kv_heads})"
        )
    kinds = tuple(read(layer_types, config)) or (FULL,) * num_layers
    if len(kinds) != num_layers:
        raise ModelError(f"{config.file} has {num_layers} layers, but layer_types names {len(kinds)}")
    if unknown := [kind for kind in kinds if kind not in (FULL, SLIDING, CHUNKED)]:
        raise ModelError(
            f"layer_types in {config.file} holds {unknown[0]!r}; known are {FULL}, {SLIDING} and {CHUNKED}"
        )
    norm = read(norm, config) or NormSpec(eps=config.number("rms_norm_eps", rms_norm_eps))
    o_bias, over = read(attn_bias, config), read(qk_norm, config)
    heads: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
        "qkv_bias": o_bias or read(qkv_bias, config),
        "o_bias": o_bias,
        "qk_norm": norm if over else None,
        "qk_norm_over": over or "head",
        **read_all(attn, config),
    }
    windows = {kind: config.integer("sliding_window") if kind == SLIDING else 0 for kind in dict.fromkeys(kinds)}
    chunks = {kind: config.size("attention_chunk_size") if kind == CHUNKED else 0 for kind in windows}
    turns = read(has_rope, config)
    if isinstance(turns, str):
        turns = [turns == "all" or (turns == "sliding" and windows[kind] > 0) for kind in kinds]
    turned = {kind for kind, turn in zip(kinds, turns, strict=True) if turn}
    way = {"interleaved": in_pairs, "backwards": backwards}
    ropes = {kind: read_rope(config, head_dim, kind, **way) if kind in turned else None for kind in windows}
    block: dict[str, Any] = {
        "intermediate_size": config.size("intermediate_size"),
        "activation": read_activation(config, activation_key),
        "bias": read(mlp_bias, config),
        **read_all(mlp, config),
    }
    around = read_all(layer, config)
    experts = _some_layers(config, "experts", read(moe, config), is_sparse)
    recurrences = _some_layers(config, "recurrences", read(mixer, config), is_recurrent)
    layers: list[LayerSpec] = []
    known: dict[Any, Any] = {}  # layers share what is alike
    for i, (kind, turn) in enumerate(zip(kinds, turns, strict=True)):
        own = {
            "rope": ropes[kind] if turn else None,
            "window": windows[kind],
            "chunk": chunks[kind],
            **at_layer(heads, i),
        }
        attention = AttentionSpec(**own) if recurrences[i] is None else NO_ATTENTION
        attention = known.setdefault(attention, attention)
        feed_forward = MlpSpec(**at_layer(block, i))
        feed_forward = known.setdefault(feed_forward, feed_forward)
        fields = {"moe": experts[i], "mixer": recurrences[i], **at_layer(around, i)}
        layers.append(LayerSpec(attn=attention, mlp=feed_forward, **fields))
    stated: dict[str, Any] = {
        "vocab_size": lambda config: config.size("vocab_size"),
        "max_position_embeddings": lambda config: _context_length(config, list(ropes.values())),
        "tie_word_embeddings": flag("tie_word_embeddings"),
        "num_further_layers": lambda config: config.integer("num_nextn_predict_layers", 0, null=0),
    }
    return ModelSpec(
        model_type=config.model_type,
        hidden_size=hidden_size,
        layers=tuple(layers),
        norm=norm,
        dtype=config.dtype,
        **read_all({**stated, **model}, config),
    )


def gpt_like(config: HFConfig, **options: Any) -> ModelSpec:
    """No rope, plain feed-forward blocks, biases everywhere, layer norms, and as many KV heads as heads, of the
    hidden size's share: GPT's layers, and BERT's, BART's and ViT's."""
    config = own_keys(config)
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    if hidden_size % num_heads:
        ours, theirs = map(config.spelled, ("hidden_size", "num_attention_heads"))
        raise ModelError(f"{ours} ({hidden_size}) in {config.file} is no multiple of {theirs} ({num_heads})")
    common = {"norm": layer_norm, "has_rope": "none", "attn_bias": True, "mlp_bias": True, "mlp": PLAIN}
    return llama_like(config, **{**common, **options})


def own_keys(config: HFConfig) -> HFConfig:
    """The config without what means nothing there, though files carry it."""
    stray = ("num_key_value_heads", "head_dim", "rope_theta", "rope_scaling", "rope_parameters")
    return config.replace(**dict.fromkeys(stray))


def _some_layers(config: HFConfig, what: str, value: Any, where: Read[Sequence[bool]]) -> ByLayer:
    """The value in layers whose flag is true, or in all without flags; None in others. Raises ModelError for flags of
    another number of layers."""
    num_layers = config.num_layers()
    if value is None:
        return ByLayer([None] * num_layers)
    flags = read(where, config) or [True] * num_layers
    if len(flags) != num_layers:
        raise ModelError(f"{config.file} has {num_layers} layers, but says of {len(flags)} whether they have {what}")
    return ByLayer(at_layer({what: value}, i)[what] if flag else None for i, flag in enumerate(flags))


def windowed_layer_types(config: HFConfig) -> Sequence[str]:
    """Qwen's layer types: if `use_sliding_window`, layers from `max_window_layers` on slide; or as listed."""
    if listed := config.texts("layer_types"):
        return listed
    num_layers = config.num_layers()
    slides = config.boolean("use_sliding_window", False) and config.integer("sliding_window", 0) > 0
    first = config.integer("max_window_layers", num_layers) if slides else num_layers
    return tuple(SLIDING if i >= first else FULL for i in range(num_layers))


def all_slide(config: HFConfig) -> Sequence[str]:
    """All layers slide, unless `sliding_window` is null or 0."""
    return [SLIDING if config.integer("sliding_window", null=0) else FULL] * config.num_layers()


def patterned_layer_types(config: HFConfig, period: int, *, full: int = -1) -> Sequence[str]:
    """Layer types as listed, or else all sliding but for the one at place `full` of each `period` layers."""
    listed, num_layers = config.texts("layer_types"), config.num_layers()
    return listed or tuple(FULL if i % period == full % period else SLIDING for i in range(num_layers))


def rms_norm(config: HFConfig, eps: float = 1e-6, *, weight: bool = True, plus_one: bool = False) -> NormSpec:
    """An RMS norm whose epsilon the config states."""
    return NormSpec(eps=config.number("rms_norm_eps", eps), weight=weight, plus_one=plus_one)


def rope_by_interval(config: HFConfig) -> Sequence[bool]:
    """Which layers have rope: `no_rope_layers` holds 1 for those, or else all but every fourth one."""
    interval = config.size("no_rope_layer_interval", 4)
    return config.flags("no_rope_layers") or [(i + 1) % interval != 0 for i in range(config.num_layers())]


def layer_norm(
    config: HFConfig, key: str = "layer_norm_eps", eps: float = 1e-5, *, bias: bool = True, plus_one: bool = False
) -> NormSpec:
    """A layer norm whose epsilon the config states under `key`."""
    return NormSpec(kind="layer", eps=config.number(key, eps), bias=bias, plus_one=plus_one)


def replace_attention(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """The spec with fields of every layer's AttentionSpec changed."""
    return replace_layers(spec, lambda layer: {"attn": dataclasses.replace(layer.attn, **changes)})


def shared_keys(config: HFConfig, kinds: Sequence[str]) -> ByLayer:
    """Of AttentionSpec.kv_layer: the last `num_kv_shared_layers` layers read keys and values of the last layer before
    of their kind. Raises ModelError if there is none."""
    first, owners = len(kinds) - config.integer("num_kv_shared_layers"), [-1] * len(kinds)
    for i in range(max(first, 0), len(kinds)):
        alike = [j for j in range(first) if kinds[j] == kinds[i]]
        if not alike:
            raise ModelError(f"{config.file} has no {kinds[i]} layer whose keys and values layer {i} could share")
        owners[i] = alike[-1]
    return ByLayer(owners)


def replace_layers(spec: ModelSpec, change: Callable[[LayerSpec], Mapping[str, Any]]) -> ModelSpec:
    """The spec with the fields that `change` names for each layer."""
    return dataclasses.replace(
        spec, layers=tuple(dataclasses.replace(layer, **change(layer)) for layer in spec.layers)
    )


def read_activation(config: HFConfig, key: str) -> Activation:
    """The activation function a config names. Raises ModelError that lists the known ones."""
    name = config.text(key)
    if name not in ACTIVATIONS:
        raise ModelError(
            f"{key} in {config.file} names the activation {name!r}{did_you_mean(name, ACTIVATIONS)}; "
            f"known are {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def read_rope(config: HFConfig, head_dim: int, layer_type: str = FULL, **way: Any) -> RopeSpec | None:
    """The rotary embedding of layers of one type; None if it turns no values. way: how it turns, see RopeSpec. Raises
    ModelError for a type or a value it cannot serve."""
    parameters = config.rope_parameters(layer_type)
    kind, whole = parameters.text("rope_type"), config.size("rope_head_dim", head_dim)
    rotary_dim = int(whole * parameters.number("partial_rotary_factor"))
    heeds_factor = config.get("model_type") in TURN_A_PART or parameters.get("heeds_partial_rotary_factor")
    if kind == "default" and not heeds_factor:
        rotary_dim = whole
    if kind == "proportional":
        scaling = RopeScaling(kind="proportional", factor=_factor(parameters, 1.0), num_turned=rotary_dim // 2)
        return RopeSpec(rotary_dim=head_dim, theta=parameters.number("rope_theta"), scaling=scaling, **way)
    if not rotary_dim:
        return None
    if not 0 < rotary_dim + rotary_dim % 2 <= head_dim:
        raise ModelError(f"{parameters.file} rotate {rotary_dim} of {head_dim} values of a head; pairs must fit in")
    return RopeSpec(
        rotary_dim=rotary_dim + rotary_dim % 2,
        is_odd=rotary_dim % 2 > 0,
        theta=parameters.number("rope_theta"),
        **way,
        scaling=_read_scaling(parameters, rotary_dim, config.integer("max_position_embeddings", 0)),
    )


def _context_length(config: HFConfig, ropes: Sequence[RopeSpec | None]) -> int:
    """Positions that the model reaches, stretching included where files state the length before it."""
    stated, scaling = config.size("max_position_embeddings"), ropes[0].scaling if ropes[0] else None
    if scaling is None or len(ropes) > 1:  # Gemma 3 stretches one of its ropes, and states the length after it
        return stated
    if scaling.kind in ("linear", "dynamic"):
        return int(stated * scaling.factor)
    if scaling.kind == "yarn":
        return max(stated, int(scaling.original_max_position_embeddings * scaling.factor))
    return stated


def _read_scaling(p: HFConfig, rotary_dim: int, max_position_embeddings: int) -> RopeScaling | None:
    kind: Any = {"su": "longrope", "mrope": "default"}.get(p.text("rope_type"), p.text("rope_type"))
    if kind == "default":  # M-RoPE's positions in three directions are one number for text
        return None
    if kind == "linear":
        return RopeScaling(kind=kind, factor=_factor(p))
    length = p.size("original_max_position_embeddings", max_position_embeddings or None)
    fields: dict[str, Any] = {}
    match kind:
        case "dynamic" | "llama3":
            factor = _factor(p)
        case "yarn" | "longrope":
            factor, stated = _factor(p, max_position_embeddings / length), p.get("attention_factor")
            fields["attention_factor"] = None if stated is None else p.number("attention_factor")
        case other:
            raise ModelError(
                f"{p.file} have the type {other!r}; known are default, linear, dynamic, llama3, yarn and longrope"
            )
    if kind == "llama3":
        fields |= {name: p.number(name) for name in ("low_freq_factor", "high_freq_factor")}
    elif kind == "longrope":
        fields |= {name: p.numbers(name, rotary_dim // 2) for name in ("short_factor", "long_factor")}
    elif kind == "yarn":
        betas = (("beta_fast", 32.0), ("beta_slow", 1.0))
        fields |= {name: p.number(name, default) or default for name, default in betas}
        fields |= {name: p.number(name, 0.0) for name in ("mscale", "mscale_all_dim")}
        fields["truncate"] = p.boolean("truncate", True)
    return RopeScaling(kind=kind, factor=factor, original_max_position_embeddings=length, **fields)


def _factor(p: HFConfig, *default: float) -> float:
    factor = p.number("factor", *default)
    if factor <= 0:
        raise ModelError(f"factor in {p.file} must be above 0, got {factor}")
    return factor
