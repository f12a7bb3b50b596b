"""Gemma's decoders: norms stored minus one, or around both blocks, scaled embeddings, windows, soft caps.

Defaults are those of transformers' config classes.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ..errors import ModelError
from ..weights.names import Stored
from .config import HFConfig
from .dense_families import ATTN_FLAG, root_of_size
from .llama_like import (
    FULL,
    SLIDING,
    ByLayer,
    llama_like,
    patterned_layer_types,
    read_rope,
    rms_norm,
    shared_keys,
)
from .mixtures import read_experts
from .name_tables import SANDWICH
from .recipes import Recipe, recipe
from .spec import AltUpSpec, ModelSpec

_GEMMA2 = {
    "max_position_embeddings": 8192, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}  # fmt: skip
_GEMMA4_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
_BIDIRECTIONAL = "{} asks for bidirectional attention (an embedding model); only causal is served"


def gemma_like(config: HFConfig, layer_types: Sequence[str], *, post_norm: bool = True, **options: Any) -> ModelSpec:
    """What Gemma 2 and 3 share: norms around both blocks, their weights stored minus one, scaled embeddings, soft
    caps, and scores scaled by query_pre_attn_scalar. layer_types: where the config lists none."""
    if config.get("use_bidirectional_attention"):
        raise ModelError(_BIDIRECTIONAL.format(config.file))
    config = config.with_defaults(
        num_key_value_heads=4, head_dim=256, hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True
    )
    return llama_like(
        config,
        layer_types=config.texts("layer_types") or layer_types,
        activation_key="hidden_activation",
        norm=partial(rms_norm, plus_one=True),
        attn={
            "scale": config.size("query_pre_attn_scalar", 256) ** -0.5,
            "softcap": config.number("attn_logit_softcapping", 0.0, null=0.0),
        },
        layer={"post_norm": post_norm},
        embed_scale=root_of_size,
        logit_softcap=config.number("final_logit_softcapping", 0.0, null=0.0),
        **ATTN_FLAG,
        **options,
    )


def _gemma(config: HFConfig) -> ModelSpec:
    if config.get("use_bidirectional_attention"):
        raise ModelError(_BIDIRECTIONAL.format(config.file))
    if config.get("hidden_act") == "gelu":  # what the first release said, and did not mean
        config = config.replace(hidden_act="gelu_pytorch_tanh")
    return llama_like(config, norm=partial(rms_norm, plus_one=True), embed_scale=root_of_size, **ATTN_FLAG)


def _gemma2(config: HFConfig, **options: Any) -> ModelSpec:
    return gemma_like(config, patterned_layer_types(config, 2), **options)


def _gemma3(config: HFConfig) -> ModelSpec:
    """Five sliding layers, then a full one whose rope has a larger base and may be stretched."""
    num_layers, pattern = config.num_layers(), config.size("sliding_window_pattern", 6)
    layer_types = [SLIDING if (i + 1) % pattern else FULL for i in range(num_layers)]
    is_encoder = config.boolean("use_bidirectional_attention", False)
    if is_encoder:  # EmbeddingGemma; the window is then what a token sees on both sides together
        window = config.size("sliding_window") // 2 + 1
        config = config.replace(use_bidirectional_attention=False, sliding_window=window)
    kind = "encoder" if is_encoder else "decoder"
    config = config.replace(attn_logit_softcapping=None)  # transformers' class knows the key, and does not heed it
    return gemma_like(with_rope_per_layer_type(config), layer_types, qk_norm="head", kind=kind)


def with_rope_per_layer_type(config: HFConfig) -> HFConfig:
    """The config with rope parameters of both kinds of layers, however they are stated."""
    ropes = HFConfig(config.mapping("rope_parameters"), file=f"rope_parameters of {config.file}")
    full = {**ropes.mapping(FULL), **config.mapping("rope_scaling")}
    full.setdefault("rope_theta", config.number("rope_theta", 1_000_000.0))
    sliding = {**ropes.mapping(SLIDING)}
    sliding.setdefault("rope_theta", config.number("rope_local_base_freq", 10_000.0))
    return config.replace(rope_scaling=None, rope_parameters={FULL: full, SLIDING: sliding})


def _gemma3n(config: HFConfig) -> ModelSpec:
    """Each layer may have a feed-forward size and a sparsity of its own; the latter is the share that is cut off."""
    num_layers = config.num_layers()
    sizes = _by_layer(config, "intermediate_size", config.get("intermediate_size"))
    sparsities = _by_layer(config, "activation_sparsity_pattern", [0.95] * 10 * (num_layers > 10))
    kinds = config.texts("layer_types") or [SLIDING if (i + 1) % 5 else FULL for i in range(num_layers)]
    config = with_rope_per_layer_type(config.replace(intermediate_size=int(sizes[0])))
    altup = AltUpSpec(
        num_streams=config.size("altup_num_inputs", 4),
        active=config.integer("altup_active_idx", 0),
        scales_output=config.boolean("altup_correct_scale", True),
    )
    return llama_like(
        config,
        layer_types=kinds,
        activation_key="hidden_activation",
        qk_norm="head",
        attn={"scale": 1.0, "value_norm": rms_norm(config, weight=False), "kv_layer": shared_keys(config, kinds)},
        mlp={"intermediate_size": ByLayer(map(int, sizes)), "sparsity": ByLayer(sparsities)},
        layer={"post_norm": True, "laurel_rank": config.size("laurel_rank", 64)},
        embed_scale=root_of_size,
        layer_input_size=config.size("hidden_size_per_layer_input", 256),
        altup=altup,
        logit_softcap=config.number("final_logit_softcapping", 30.0, null=0.0),
        **ATTN_FLAG,
    )


def _by_layer(config: HFConfig, key: str, default: object) -> list[float]:
    """A number for each layer: as listed, or one for all; a list that is the default may be short."""
    num_layers, stated = config.num_layers(), config.get(key)
    values = default if stated is None else stated
    values = [values] * num_layers if not isinstance(values, list | tuple) else [*values]
    if stated is None:
        values += [0.0] * (num_layers - len(values))
    if len(values) != num_layers or any(isinstance(v, bool) or not isinstance(v, int | float) for v in values):
        raise ModelError(f"{key} in {config.file} must be a number, or one for each of {num_layers} layers")
    return values


def _gemma4(config: HFConfig) -> ModelSpec:
    """Full layers have larger heads; the last layers read keys and values of the last layer before of their kind."""
    if config.get("use_bidirectional_attention") == "all":
        raise ModelError(_BIDIRECTIONAL.format(config.file))
    config = config.alias(hidden_act="hidden_activation")
    num_layers = config.num_layers()
    kinds = list(config.texts("layer_types")) or [FULL if i % 6 == 5 else SLIDING for i in range(num_layers)]
    kinds[-1] = FULL
    first_shared = num_layers - config.integer("num_kv_shared_layers")
    size, wide = config.size("intermediate_size"), 2 if config.boolean("use_double_wide_mlp", False) else 1
    has_experts, hidden_size = config.boolean("enable_moe_block", False), config.size("hidden_size")
    return llama_like(
        config,
        layer_types=kinds,
        qk_norm="head",
        attn=_attention(config, kinds),
        mlp={"intermediate_size": ByLayer(size * wide if i >= first_shared else size for i in range(num_layers))},
        moe=read_experts(config, router_scale=hidden_size**-0.5) if has_experts else None,
        layer={"moe_beside": has_experts, "post_norm": True, "has_scalar": True},
        embed_scale=root_of_size,
        layer_input_size=config.integer("hidden_size_per_layer_input", 256, null=0),
        logit_softcap=config.number("final_logit_softcapping", 0.0, null=0.0),
        **ATTN_FLAG,
    )


def _attention(config: HFConfig, kinds: Sequence[str]) -> Mapping[str, Any]:
    """Fields of each layer's attention."""
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    by_layer = {int(key): value for key, value in config.mapping("per_layer_config").items()}
    head_dims, kv_heads, is_key = list[int](), list[int](), list[bool]()
    for i, kind in enumerate(kinds):
        value_is_key = kind == FULL and config.boolean("attention_k_eq_v", False)
        own = HFConfig(by_layer.get(i, {}), file=config.file)
        if config.get("per_layer_config") is None and kind == FULL:
            num = config.get("num_global_key_value_heads") if value_is_key else None
            own = own.replace(head_dim=config.size("global_head_dim", 512), num_key_value_heads=num)
        head_dims.append(own.size("head_dim", config.size("head_dim", hidden_size // num_heads or None)))
        kv_heads.append(own.size("num_key_value_heads", config.size("num_key_value_heads", num_heads)))
        is_key.append(value_is_key)
    return {
        "num_kv_heads": ByLayer(kv_heads),
        "head_dim": ByLayer(head_dims),
        "scale": 1.0,
        "rope": ByLayer(read_rope(config, dim, kind) for dim, kind in zip(head_dims, kinds, strict=True)),
        "value_norm": rms_norm(config, weight=False),
        "value_is_key": ByLayer(is_key),
        "kv_layer": shared_keys(config, kinds),
    }


GEMMA_FAMILIES: Mapping[str, Recipe] = {
    # Gemma 1: norm weights stored minus one, scaled embeddings, a gated tanh GELU; the head is tied.
    "gemma": recipe(
        _gemma,
        defaults=dict(
            num_key_value_heads=16, head_dim=256, max_position_embeddings=8192, hidden_act="gelu_pytorch_tanh",
            tie_word_embeddings=True,
        ),
    ),
    # Gemma 2: norms around both blocks, scaled embeddings, soft caps, every other layer slides.
    "gemma2": recipe(_gemma2, defaults=_GEMMA2, names=SANDWICH),
    # Gemma 3, text only: Gemma 2 with normalised heads instead of soft caps, and a rope per layer type.
    "gemma3_text": recipe(
        _gemma3, defaults=dict(max_position_embeddings=131072, sliding_window=4096), names=SANDWICH,
    ),
    # The language model of Gemma 3n: four residual streams, a path of low rank beside attention, sparse activations,
    # inputs of each layer's own, and layers that read the keys and values of others.
    "gemma3n_text": recipe(
        _gemma3n,
        defaults=dict(
            num_key_value_heads=2, head_dim=256, max_position_embeddings=32768, hidden_activation="gelu_pytorch_tanh",
            sliding_window=512, tie_word_embeddings=True, num_kv_shared_layers=15, intermediate_size=16384,
        ),
        names={
            **SANDWICH, "altup_in.{i}": "model.altup_projections.{i}",
            "altup_out.{i}": "model.altup_unembed_projections.{i}", "altup.router_norm": "altup.router_norm",
            "altup.router": "altup.modality_router", "altup.predict": "altup.prediction_coefs",
            "altup.correct": "altup.correction_coefs", "laurel.in_proj": "laurel.linear_left",
            "laurel.out_proj": "laurel.linear_right", "laurel.norm": "laurel.post_laurel_norm",
        },
        tensors={"altup.scale": "altup.correct_output_scale"},
    ),
    # Gemma 4, text only: keys and values that layers share, inputs of each layer, experts beside the dense block.
    "gemma4_text": recipe(
        _gemma4, keys=dict(num_experts_per_tok="top_k_experts"),
        defaults=dict(
            num_key_value_heads=4, head_dim=256, max_position_embeddings=131072, sliding_window=512,
            hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True, rope_parameters=_GEMMA4_ROPES,
            num_kv_shared_layers=0,
        ),
        names={
            **SANDWICH, "mlp_out_norm": "post_feedforward_layernorm_1", "moe_norm": "pre_feedforward_layernorm_2",
            "moe_out_norm": "post_feedforward_layernorm_2", "moe.router": "router.proj",
        },
        tensors={
            "scalar": Stored(name="layer_scalar", is_scalar=True),
            "moe.router_norm.weight": "router.scale",
            "moe.experts.gate_up_proj.weight": Stored(name="experts.gate_up_proj", stacked=True),
            "moe.experts.down_proj.weight": Stored(
                name="experts.down_proj", stacked=True, scaled_by="router.per_expert_scale"
            ),
        },
    ),
    # VaultGemma: Gemma 2 without norms behind the blocks.
    "vaultgemma": recipe(_gemma2, defaults=_GEMMA2, post_norm=False),
}  # fmt: skip
"""model_type -> what sets it apart."""
