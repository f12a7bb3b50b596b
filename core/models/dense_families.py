"""Decoders that are Llama, or what a reader here makes of it, but for what their entries say.

Defaults are those of transformers' config classes. A family that takes more than this is a file in families/.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ..errors import ModelError
from ..weights.names import Stored
from .config import NOTHING, HFConfig, flag, number
from .llama_like import (
    FULL,
    PLAIN,
    SLIDING,
    ByLayer,
    all_slide,
    layer_norm,
    llama_like,
    patterned_layer_types,
    read_rope,
    rms_norm,
    rope_by_interval,
    windowed_layer_types,
)
from .name_tables import SANDWICH, glu, megatron, name_table
from .recipes import Recipe, recipe
from .spec import LayerSpec, ModelSpec, NormSpec

ATTN_FLAG: Mapping[str, Any] = {"attn_bias": flag("attention_bias")}
FLAGS: Mapping[str, Any] = {**ATTN_FLAG, "mlp_bias": flag("mlp_bias")}
_BIASES: Mapping[str, Any] = {"attn_bias": True, "mlp_bias": True}
UNDER_ONE_NORM: Mapping[str, Any] = {"parallel": True, "shared_norm": True}
NUM_IMAGE_TOKENS = 8
"""Of Llama 3.2 Vision, behind its vocabulary."""
_POST_NORM: Mapping[str, Any] = {"pre_norm": False, "post_norm": True}
_APERTUS: Mapping[str, Any] = {
    "max_position_embeddings": 65536, "hidden_act": "xielu", "rope_theta": 12000000.0, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 12000000.0, "factor": 8.0, "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
}  # fmt: skip
_APERTUS_NAMES: Mapping[str, Any] = {
    "tensors": {"mlp.act.alpha_p": "mlp.act_fn.alpha_p", "mlp.act.alpha_n": "mlp.act_fn.alpha_n"},
    "ignore": (r"\.act_fn\.(beta|eps)$",),  # constants of the activation: 0.5 and -1e-6
}
_QWEN = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
EXAONE4: Mapping[str, Any] = {"num_key_value_heads": 32, "max_position_embeddings": 2048, "sliding_window": 4096}
_GLM = {
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "partial_rotary_factor": 0.5,
}  # fmt: skip
granite_like = partial(
    llama_like,
    attn={"scale": number("attention_multiplier", 1.0)},
    layer={"residual_scale": number("residual_multiplier", 1.0)},
    embed_scale=number("embedding_multiplier", 1.0),
    logit_scale=lambda config: 1 / config.positive("logits_scaling", 1.0),
)
"""Llama with multipliers on embeddings, scores, blocks and logits."""
granite_swa_like = partial(
    granite_like,
    layer_types=lambda config: patterned_layer_types(config, 4, full=0),
    attn={"scale": number("attention_multiplier", 1.0), "sinks": True, "rope": lambda config: _rope_by_layer(config)},
)
"""Granite with sinks, three sliding layers to a full one, and a base of rope for each layer."""
olmo2_like = partial(
    llama_like,
    rms_norm_eps=1e-5,
    attn_bias=flag("attention_bias"),
    qk_norm="all",
    layer=_POST_NORM,
)
"""Llama with norms after the blocks instead of before, and over all heads of query and key at once."""
glm_like = partial(llama_like, rms_norm_eps=1.5625e-07, in_pairs=True, qkv_bias=flag("attention_bias", True))
"""Llama with biases on query, key and value, and rope in pairs; o_proj never has a bias."""
GROWTH: Mapping[str, Any] = {
    "temperature_scale": lambda config: config.rope_parameters().number("llama_4_scaling_beta", 0.0),
    "temperature_length": lambda config: config.rope_parameters().size("original_max_position_embeddings"),
}
"""Queries that grow with the position, as the rotary parameters say."""


def cohere_like(config: HFConfig, **options: Any) -> ModelSpec:
    """Parallel blocks under one layer norm without bias, interleaved rope, scaled logits."""
    config = config.with_defaults(max_position_embeddings=8192, tie_word_embeddings=True)
    options = {"norm": partial(layer_norm, bias=False), **ATTN_FLAG, **options}
    return llama_like(
        config, in_pairs=True, layer=UNDER_ONE_NORM, logit_scale=number("logit_scale", 0.0625), **options
    )


def hunyuan_like(config: HFConfig, **options: Any) -> ModelSpec:
    """Heads are normalised after rope. "dynamic" scaling with an `alpha` is a larger base of rope, no more."""
    rope = config.with_defaults(max_position_embeddings=2048).rope_parameters()
    if rope.get("rope_type") == "dynamic" and rope.get("alpha"):
        head_dim = config.size("head_dim", config.size("hidden_size") // config.size("num_attention_heads"))
        theta = rope.number("rope_theta") * rope.number("alpha") ** (head_dim / (head_dim - 2))
        config = config.replace(rope_scaling=None, rope_parameters={"rope_type": "default", "rope_theta": theta})
    config = config.with_defaults(max_position_embeddings=2048)
    return llama_like(
        config, rms_norm_eps=1e-5, qk_norm="head", attn={"norm_after_rope": True}, **ATTN_FLAG, **options
    )


def _cohere_compass(config: HFConfig, **options: Any) -> ModelSpec:
    """Layers of a kind whose rope parameters are null turn nothing."""
    kinds, stated = config.texts("layer_types") or (FULL,) * config.num_layers(), config.mapping("rope_parameters")
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    ropes = {kind: stated[kind] if kind in stated else stated or plain for kind in kinds}
    config = config.replace(rope_parameters={kind: rope or plain for kind, rope in ropes.items()})
    return llama_like(config, layer_types=kinds, has_rope=[ropes[kind] is not None for kind in kinds], **options)


def exaone4_like(config: HFConfig, *, layer: Mapping[str, Any] = _POST_NORM, **options: Any) -> ModelSpec:
    """Norms after the blocks, normalised heads; with a window, only sliding layers have rope. The pattern is a
    number, or one letter a layer: L slides, G sees all."""
    has_window, pattern = config.integer("sliding_window", null=0) > 0, config.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):
        period = len(pattern)
    else:
        period = config.integer("sliding_window_pattern", 4, null=0)
    layer_types = config.texts("layer_types") or [
        SLIDING if has_window and period and (i + 1) % period else FULL for i in range(config.num_layers())
    ]
    return llama_like(
        config,
        layer_types=layer_types,
        rms_norm_eps=1e-5,
        qk_norm="head",
        has_rope="sliding" if has_window else "all",
        layer=layer,
        **options,
    )


def _rope_by_layer(config: HFConfig) -> ByLayer:
    """A base of rope for each layer, if the config lists them; one of 0 is no rope (Granite SWA)."""
    num_layers, num_heads = config.num_layers(), config.size("num_attention_heads")
    rope = read_rope(config, config.size("head_dim", config.size("hidden_size") // num_heads or None))
    if rope is None:
        return ByLayer([None] * num_layers)
    thetas = config.get("layer_rope_theta") or [rope.theta] * num_layers
    if len(thetas) != num_layers:
        raise ModelError(f"{config.file} must list as many layer_rope_theta as layers")
    thetas = [rope.theta if theta is None else float(theta) for theta in thetas]
    return ByLayer(dataclasses.replace(rope, theta=theta) if theta else None for theta in thetas)


def root_of_size(config: HFConfig) -> float:
    """What scaled embeddings are multiplied by."""
    return float(config.size("hidden_size") ** 0.5)


def _olmo3(config: HFConfig) -> ModelSpec:
    """`rope_scaling` holds for full layers."""
    ropes, theta = config.mapping("rope_parameters"), config.number("rope_theta", 500000.0)
    kinds = ("full_attention", "sliding_attention")
    by_type = {kind: {"rope_theta": theta, **(ropes.get(kind) or {})} for kind in kinds}
    by_type[kinds[0]].update(config.mapping("rope_scaling"))
    config = config.replace(rope_scaling=None, rope_parameters=by_type)
    return olmo2_like(config, layer_types=patterned_layer_types(config, 4))


def _first_of_four_is_full(config: HFConfig) -> Sequence[str]:
    return patterned_layer_types(config, 4, full=0) if config.integer("sliding_window", null=0) else ()


def _phi3(config: HFConfig) -> ModelSpec:
    scaling = config.mapping("rope_scaling")
    if scaling.get("rope_type", scaling.get("type")) in ("su", "yarn"):  # what early releases called LongRoPE
        config = config.replace(rope_scaling={**scaling, "rope_type": "longrope"})
    return llama_like(config, layer_types=all_slide, rms_norm_eps=1e-5)


def _apertus(config: HFConfig) -> ModelSpec:
    """Other activations than xIELU have no parameters; a GGUF file says them in its config."""
    is_xielu, alphas = config.text("hidden_act") == "xielu", config.get("xielu_alphas")
    known = None if alphas is None else ByLayer((float(p), float(n)) for p, n in alphas)
    return llama_like(
        config.replace(hidden_act="silu") if is_xielu else config,
        rms_norm_eps=1e-5,
        qk_norm="head",
        mlp={"gated": False, "xielu": is_xielu, "xielu_alphas": known},
        **ATTN_FLAG,
    )


def _apertus1p5(config: HFConfig) -> ModelSpec:
    """`output_vocab_size` tokens can be written, the first ones."""
    spec = _apertus(config)
    written = config.size("output_vocab_size", spec.vocab_size)
    if written > spec.vocab_size:
        raise ModelError(
            f"output_vocab_size ({written}) in {config.file} is more than vocab_size ({spec.vocab_size})"
        )
    return dataclasses.replace(spec, vocab_size=written, num_extra_tokens=spec.vocab_size - written)


def _baichuan(config: HFConfig) -> ModelSpec:
    """No key says ALiBi or which head: hidden_size and vocab_size tell the sizes and the generations apart."""
    is_small, is_second = config.size("hidden_size") == 4096, config.size("vocab_size") == 125696
    return llama_like(
        config,
        has_rope="all" if is_small else "none",
        attn={"alibi_max_bias": 0.0 if is_small else 8.0},
        lm_head_unit_rows=is_second,
    )


def _smollm3(config: HFConfig, **options: Any) -> ModelSpec:
    has_rope = rope_by_interval(config)
    slides = config.boolean("use_sliding_window", False) and config.integer("sliding_window", null=0) > 0
    layer_types = config.texts("layer_types") or [SLIDING if slides and not turns else FULL for turns in has_rope]
    return llama_like(config, layer_types=layer_types, has_rope=has_rope, **options)


def _stablelm(config: HFConfig) -> ModelSpec:
    norms_heads, is_parallel = config.boolean("qk_layernorm", False), config.boolean("use_parallel_residual", False)
    head_norm = layer_norm(config, bias=False) if norms_heads else None
    return llama_like(
        config.replace(head_dim=None, rope_head_dim=config.get("head_dim")),
        norm=layer_norm,
        qkv_bias=flag("use_qkv_bias"),
        attn={"qk_norm": head_norm, "qk_norm_over": "heads" if norms_heads else "head"},
        layer=UNDER_ONE_NORM if is_parallel else NOTHING,
    )


def _own_scale(config: HFConfig) -> float:
    """What scores are multiplied by: Llama's factor unless the config says another."""
    head_dim = config.size("head_dim", config.size("hidden_size") // config.size("num_attention_heads"))
    scale = head_dim**-0.5
    return config.number("attention_multiplier", scale, null=scale)


def _diffllama(config: HFConfig) -> ModelSpec:
    num_heads = config.size("num_attention_heads")
    num_kv_heads = config.size("num_key_value_heads", num_heads)
    if num_kv_heads % 2:
        raise ModelError(f"num_key_value_heads ({num_kv_heads}) in {config.file} must be even")
    attn = {
        "num_heads": 2 * num_heads,
        "num_kv_heads": 2 * num_kv_heads,
        "out_norm": rms_norm(config, 1e-5, weight=False),
        "difference": ByLayer(0.8 - 0.6 * math.exp(-0.3 * i) for i in range(config.num_layers())),
    }
    return llama_like(config, rms_norm_eps=1e-5, attn=attn, **ATTN_FLAG)


def _mllama(config: HFConfig) -> ModelSpec:
    """Layers that attend to images alone do nothing."""
    spec, crossed = llama_like(config, rms_norm_eps=1e-5), config["cross_attention_layers"]
    layers = (LayerSpec() if i in crossed else layer for i, layer in enumerate(spec.layers))
    return dataclasses.replace(spec, layers=tuple(layers))


DENSE_FAMILIES: Mapping[str, Recipe] = {
    # Apertus: normalised heads and a plain feed-forward block with the xIELU activation.
    "apertus": recipe(_apertus, defaults=_APERTUS, **_APERTUS_NAMES),
    # The language model of Apertus 1.5: Apertus, whose head may lack the tokens that stand for images and sounds.
    "apertus1p5_text": recipe(_apertus1p5, defaults=_APERTUS, **_APERTUS_NAMES),
    # Arcee AFM: Llama with a plain feed-forward block, relu squared.
    "arcee": recipe(
        defaults=dict(max_position_embeddings=4096, hidden_act="relu2"), rms_norm_eps=1e-5, mlp=PLAIN, **FLAGS,
    ),
    # Baichuan 1 and 2: Llama with fused qkv; 13B has ALiBi instead of rope, and 2 has a head of rows of length 1.
    "baichuan": recipe(
        _baichuan, keys=dict(max_position_embeddings="model_max_length"),
    ),
    # BitNet: Llama with squared ReLU and a norm before the last projection of each block. Weights of three values are
    # stored as plain ones.
    "bitnet": recipe(
        defaults=dict(num_key_value_heads=5, max_position_embeddings=2048, hidden_act="relu2", rope_theta=500000.0),
        rms_norm_eps=1e-5, attn=dict(out_norm=partial(rms_norm, eps=1e-5)),
        mlp=dict(inner_norm=partial(rms_norm, eps=1e-5)), **ATTN_FLAG,
    ),
    # Command R: parallel blocks under one layer norm without bias, interleaved rope, scaled logits; R+ normalises
    # each head of query and key with a weight of its own.
    "cohere": recipe(
        lambda config: cohere_like(config, qk_norm="heads" if config.boolean("use_qk_norm", False) else None),
        defaults=dict(rope_theta=500000.0),
        names={f"attn.{name}_norm": Stored(name=f"self_attn.{name}_norm", stacked=True) for name in "qk"},
    ),
    # Command A and R7B: Command R with three sliding layers to a full one, which has no rope.
    "cohere2": recipe(
        cohere_like, defaults=dict(sliding_window=4096),
        layer_types=lambda config: patterned_layer_types(config, config.size("sliding_window_pattern", 4)),
        has_rope="sliding",
    ),
    # The language model of North Micro Vision: Command R whose kinds of layers have ropes of their own, which turn
    # halves, or none.
    "cohere_compass_text": recipe(
        _cohere_compass,
        defaults=dict(max_position_embeddings=8192, sliding_window=4096, tie_word_embeddings=True),
        norm=partial(layer_norm, bias=False), layer=UNDER_ONE_NORM, logit_scale=number("logit_scale", 1.0, null=1.0),
        **ATTN_FLAG,
    ),
    # Code World Model: Llama 3 whose layers slide, but for the first of every four; without a window they see
    # everything.
    "cwm": recipe(
        defaults=dict(
            num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, sliding_window=8192,
            rope_theta=1000000.0, rope_parameters=dict(
                rope_type="llama3", rope_theta=1000000.0, factor=16.0, high_freq_factor=4.0, low_freq_factor=1.0,
                original_max_position_embeddings=8192,
            ),
        ),
        layer_types=_first_of_four_is_full, rms_norm_eps=1e-5, mlp_bias=flag("mlp_bias"),
    ),
    # DiffLlama: Llama with differential attention, whose factor starts higher in later layers.
    "diffllama": recipe(
        _diffllama, defaults=dict(max_position_embeddings=2048),
        tensors={f"attn.lambda_{name}": f"self_attn.lambda_{name}" for name in ("q1", "k1", "q2", "k2")},
    ),
    # ERNIE 4.5, dense: Llama with interleaved rope and one flag for all biases.
    "ernie4_5": recipe(
        defaults=dict(
            num_key_value_heads=2, head_dim=128, max_position_embeddings=131072, rope_theta=500000.0,
            tie_word_embeddings=True,
        ),
        rms_norm_eps=1e-5, in_pairs=True, attn_bias=flag("use_bias"), mlp_bias=flag("use_bias"),
    ),
    # EXAONE 4: norms after the blocks, normalised heads; with a window, only sliding layers have rope.
    "exaone4": recipe(exaone4_like, defaults=EXAONE4, names=SANDWICH),
    # GLM-4 9B: Llama with qkv biases, packed gate and up, and half of each head turned in pairs.
    "glm": recipe(glm_like, defaults=_GLM),
    # GLM-4-0414: GLM with norms after both blocks too.
    "glm4": recipe(
        glm_like, defaults=_GLM,
        layer=dict(post_norm=True),
    ),
    # Granite 3 and 4 (dense): Llama with multipliers on embeddings, scores, blocks and logits.
    "granite": recipe(granite_like, defaults=dict(max_position_embeddings=2048), **FLAGS),
    # Granite SWA: Granite with sinks, three sliding layers to a full one, and a base of rope for each layer.
    "granite_swa": recipe(
        granite_swa_like,
        defaults=dict(
            sliding_window=128, num_key_value_heads=4, max_position_embeddings=8192, rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        ),
        **FLAGS,
    ),
    # Helium: Llama with interleaved rope; o_proj never has a bias.
    "helium": recipe(
        defaults=dict(num_key_value_heads=20, head_dim=128, max_position_embeddings=4096, rope_theta=100000.0),
        rms_norm_eps=1e-8, qkv_bias=flag("attention_bias"), mlp_bias=flag("mlp_bias"), in_pairs=True,
    ),
    # Hunyuan V1, dense: Llama whose query and key heads are normalised after rope.
    "hunyuan_v1_dense": recipe(hunyuan_like),
    # HyperCLOVA X SEED: Granite with norms behind the blocks too, and logits that are multiplied; scores are scaled
    # as Llama's unless the config says otherwise.
    "hyperclovax": recipe(
        granite_like, defaults=dict(max_position_embeddings=2048), attn=dict(scale=_own_scale),
        layer=dict(residual_scale=number("residual_multiplier", 1.0), post_norm=flag("use_post_norm", True)),
        logit_scale=number("logits_scaling", 1.0), **FLAGS,
    ),
    # InternLM 2 and 2.5: Llama under names of its own, q, k and v fused KV head by KV head.
    "internlm2": recipe(
        defaults=dict(max_position_embeddings=32768),
        names=lambda: name_table(
            {
                "embed_tokens": "model.tok_embeddings", "final_norm": "model.norm", "lm_head": "output",
                "attn_norm": "attention_norm", "attn.o_proj": "attention.wo", "mlp_norm": "ffn_norm",
                "attn.qkv_proj": Stored(name="attention.wqkv", interleaved=True),
                **glu("mlp", "feed_forward"),
            },
        ),
        attn_bias=flag("bias"),
    ),
    # InternLM3: Llama, whose linears may have biases.
    "internlm3": recipe(
        keys=dict(attention_bias="qkv_bias", mlp_bias="bias"),
        defaults=dict(num_key_value_heads=2, head_dim=128, max_position_embeddings=32768), rms_norm_eps=1e-5, **FLAGS,
    ),
    # Jais 2: layer norms, biases everywhere, a plain feed-forward block with relu squared.
    "jais2": recipe(
        defaults=dict(max_position_embeddings=8192, hidden_act="relu2"), norm=layer_norm,
        attn_bias=flag("attention_bias", True), mlp_bias=flag("mlp_bias", True), mlp=PLAIN,
    ),
    # Llama 1 to 3.2, and what calls itself llama: SmolLM2, Yi, Vicuna and many more.
    "llama": recipe(defaults=dict(max_position_embeddings=2048), **FLAGS),
    # Ministral 3: Llama with YaRN, whose queries grow with the position: `llama_4_scaling_beta` among the rope
    # parameters says how fast.
    "ministral3": recipe(
        defaults=dict(
            num_key_value_heads=8, head_dim=128, max_position_embeddings=262144, sliding_window=None,
            rope_parameters=dict(
                rope_type="yarn", rope_theta=1000000.0, factor=16.0, beta_fast=32.0, beta_slow=1.0,
                original_max_position_embeddings=16384, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1,
            ),
        ),
        layer_types=all_slide, rms_norm_eps=1e-5,
        attn=GROWTH,
    ),
    # Mistral 7B, Nemo, Small, Ministral 8B: Llama, all layers of which slide unless `sliding_window` is null. An
    # absent key means 4096, as the class has it.
    "mistral": recipe(
        defaults=dict(num_key_value_heads=8, max_position_embeddings=131072, sliding_window=4096),
        layer_types=lambda config: config.texts("layer_types") or all_slide(config),
    ),
    # Llama 3.2 Vision as it reads text. Embeddings of the tokens that stand for images are left out.
    "mllama_text_model": recipe(
        _mllama,
        defaults=dict(
            num_key_value_heads=8, max_position_embeddings=131072, rope_theta=500000.0,
            cross_attention_layers=[3, 8, 13, 18, 23, 28, 33, 38],
        ),
        names={"embed_tokens": Stored(name="model.embed_tokens", extra_rows=NUM_IMAGE_TOKENS)},
    ),
    # nanochat: squared ReLU, capped logits, norms without weights, also of the embeddings and of turned heads; rope
    # turns the other way.
    "nanochat": recipe(
        defaults=dict(max_position_embeddings=2048, hidden_act="relu2"), backwards=True,
        norm=partial(rms_norm, weight=False), qk_norm="head", attn=dict(norm_after_rope=True), mlp=PLAIN,
        embed_norm=True, logit_softcap=number("final_logit_softcapping", 15.0, null=0.0), **ATTN_FLAG,
    ),
    # Nemotron 3 and 4, Minitron: layer norms stored minus one, half of each head turned, a plain feed-forward block
    # with relu squared; early files say rope_percent.
    "nemotron": recipe(
        defaults=dict(
            max_position_embeddings=4096, hidden_act="relu2",
            partial_rotary_factor=lambda config: config.get("rope_percent", 0.5),
        ),
        norm=partial(layer_norm, key="norm_eps", plus_one=True), mlp=PLAIN, **FLAGS,
    ),
    # OLMo 1: layer norms without weights; query, key and value may be clipped.
    "olmo": recipe(
        defaults=dict(max_position_embeddings=2048), norm=NormSpec(kind="layer", eps=1e-5, weight=False),
        attn=dict(clip_qkv=number("clip_qkv", 0.0, null=0.0)), **ATTN_FLAG,
    ),
    # OLMo 2: norms after the blocks instead of before, and over all heads of query and key at once.
    "olmo2": recipe(olmo2_like, defaults=dict(max_position_embeddings=2048), names=SANDWICH),
    # OLMo 3: OLMo 2 with three sliding layers to a full one, whose rope alone is stretched.
    "olmo3": recipe(_olmo3, defaults=dict(max_position_embeddings=2048, sliding_window=4096), names=SANDWICH),
    # Persimmon: layer norms, on heads too, fused qkv, half of each head turned, relu squared, biases everywhere, as
    # many KV heads as heads.
    "persimmon": recipe(
        defaults=dict(max_position_embeddings=16384, hidden_act="relu2", partial_rotary_factor=0.5),
        fixed=dict(num_key_value_heads=None, head_dim=None, rope_head_dim=lambda config: config.get("head_dim")),
        names=megatron("self_attn"),
        qk_norm=lambda config: "head" if config.boolean("qk_layernorm", True) else None, norm=layer_norm, mlp=PLAIN,
        **_BIASES,
    ),
    # Phi-1, 1.5 and 2: parallel blocks under one layer norm, partial rope, biases everywhere, on the head too.
    "phi": recipe(
        defaults=dict(max_position_embeddings=2048, hidden_act="gelu_new", partial_rotary_factor=0.5),
        norm=layer_norm, qk_norm=lambda config: "head" if config.boolean("qk_layernorm", False) else None, mlp=PLAIN,
        layer=UNDER_ONE_NORM, lm_head_bias=True, **_BIASES,
    ),
    # Phi-3, Phi-3.5 and Phi-4 (mini): Llama with packed projections, LongRoPE and partial rotary embedding; all
    # layers slide if `sliding_window` is set.
    "phi3": recipe(
        _phi3,
        defaults=dict(max_position_embeddings=4096, original_max_position_embeddings=4096, sliding_window=None),
    ),
    # Qwen1.5, Qwen2 and Qwen2.5: Llama with biases on query, key and value; the upper layers may slide.
    "qwen2": recipe(defaults=dict(**_QWEN, num_key_value_heads=32), layer_types=windowed_layer_types, qkv_bias=True),
    # Qwen3, dense: Llama whose query and key heads are normalised; head_dim is stated, not hidden_size / num_heads.
    "qwen3": recipe(
        defaults=dict(**_QWEN, num_key_value_heads=32, head_dim=128), layer_types=windowed_layer_types,
        qk_norm="head", **ATTN_FLAG,
    ),
    # Seed-OSS: Llama with biases on query, key and value; each bias has a flag of its own.
    "seed_oss": recipe(
        defaults=dict(num_key_value_heads=8, head_dim=128, max_position_embeddings=524288),
        qkv_bias=flag("attention_bias", True), attn=dict(o_bias=flag("attention_out_bias")),
        mlp_bias=flag("mlp_bias"),
    ),
    # SmolLM3: Llama, every fourth layer of which has no rope; only such layers may slide.
    "smollm3": recipe(
        _smollm3,
        defaults=dict(
            num_key_value_heads=4, max_position_embeddings=32768, rope_theta=2000000.0, tie_word_embeddings=True,
            sliding_window=None,
        ),
        **FLAGS,
    ),
    # StableLM 2 and 3B: layer norms, a quarter of each head turned; the 12B has parallel blocks under one norm and
    # normalised heads.
    "stablelm": recipe(
        _stablelm,
        defaults=dict(num_key_value_heads=32, max_position_embeddings=4096, partial_rotary_factor=0.25),
        names={f"attn.{name}_norm.{{j}}": f"self_attn.{name}_layernorm.norms.{{j}}" for name in "qk"},
    ),
    # StarCoder 2: Llama's attention in a GPT-2 block, with layer norms, a plain GELU and biases everywhere; all
    # layers slide if `sliding_window` is set.
    "starcoder2": recipe(
        defaults=dict(
            num_key_value_heads=2, max_position_embeddings=4096, hidden_act="gelu_pytorch_tanh", sliding_window=None,
            tie_word_embeddings=True,
        ),
        layer_types=all_slide, norm=partial(layer_norm, key="norm_epsilon"), attn_bias=flag("use_bias", True),
        mlp_bias=flag("use_bias", True), mlp=PLAIN,
    ),
}  # fmt: skip
"""model_type -> what sets it apart."""
