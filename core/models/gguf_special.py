"""What files of single architectures leave unsaid, or say in a way of their own: keys of config.json."""

import math
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any

from ..errors import ModelError
from .gguf_file import GGUFFile, read_factors
from .llama_like import FULL, SLIDING

_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""Gemma's largest models scale scores by hidden_size / num_heads instead of head_dim; GGUF does not say so, and
llama.cpp knows them by their number of layers."""
_EARLY_GEMMA2 = {
    "sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
}  # fmt: skip
"""What early Gemma 2 files leave out."""


def _llama(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    if file.keys.get("expert_count"):
        return {"model_type": "mixtral"}
    return {"model_type": "mistral"} if values["sliding_window"] else {}


def _gemma(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    keys, head_dim = file.keys, values["head_dim"]
    early = {k: v for k, v in _EARLY_GEMMA2.items() if file.arch == "gemma2" and values.get(k) is None}
    is_27b = keys["block_count"] == _LAYERS_OF_27B.get(file.arch)
    found = {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        **{key: values[key] for key in _EARLY_GEMMA2 if values.get(key) is not None},
        **early,
        "query_pre_attn_scalar": values["hidden_size"] // values["num_attention_heads"] if is_27b else head_dim,
    }
    return found if file.arch == "gemma2" else {**found, **_two_ropes(file, values, 10_000.0, 1_000_000.0)}


def _two_ropes(file: GGUFFile, values: Mapping[str, Any], sliding: float, full: float) -> dict[str, Any]:
    """Parameters of rope for each type of layer; those that slide are not stretched."""
    return {
        "rope_parameters": {
            FULL: {**values["rope_parameters"], "rope_theta": file.keys.number("rope.freq_base", full)},
            SLIDING: {"rope_theta": file.keys.number("rope.freq_base_swa", sliding)},
        }
    }


def _granite(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    scale = values.get("attention_multiplier", values.get("head_dim", 1) ** -0.5)  # as llama.cpp has it
    return {"attention_multiplier": scale, "logits_scaling": file.keys.number("logit_scale", 1.0)}


def _minicpm(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Early files leave out the multipliers, which are those of MiniCPM 1."""
    return {
        **_granite(file, values),
        "embedding_multiplier": values.get("embedding_multiplier", 12.0),
        "residual_multiplier": values.get("residual_multiplier", 1.4 / values["num_hidden_layers"] ** 0.5),
        "logits_scaling": file.keys.number("logit_scale", values["hidden_size"] / 256),
    }


def _granite_hybrid(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    found = {**_granite(file, values), **_mamba2(file, values)}
    if not file.keys.get("expert_count"):
        found |= {"num_local_experts": 0, "shared_intermediate_size": values["intermediate_size"]}
    has_rope = file.keys.boolean("rope.scaling.finetuned", False)
    return {**found, "position_embedding_type": "rope" if has_rope else "nope"}


def _cohere(file: GGUFFile, _: Mapping[str, Any]) -> dict[str, Any]:
    return {"logit_scale": file.keys.number("logit_scale", 1.0)}


def _stablelm(file: GGUFFile, _: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_parallel_residual": "ffn_norm.weight" not in file.leaves}


def _olmo2(_: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"model_type": "olmo3"} if values["sliding_window"] else {}


def _qwen2_moe(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Early files leave out sizes of experts."""
    size = file.keys.size("feed_forward_length")
    own = values.get("moe_intermediate_size") or size // file.keys.size("expert_used_count")
    return {
        "moe_intermediate_size": own,
        "shared_expert_intermediate_size": values.get("shared_expert_intermediate_size", size),
    }


def _gpt_oss(_: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {**values["rope_parameters"], "truncate": False}}


def _falcon(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    num_kv_heads, has_two = file.keys.integer("attention.head_count_kv", 1), "attn_norm_2.weight" in file.leaves
    is_new = has_two or num_kv_heads > 1
    return {"new_decoder_architecture": is_new, "num_ln_in_parallel_attn": 2 if has_two else 1}


def _bigcode(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"multi_query": file.keys.integer("attention.head_count_kv", 1) == 1}


def _mpt(file: GGUFFile, _: Mapping[str, Any]) -> dict[str, Any]:
    max_bias = file.keys.number("attention.max_alibi_bias", 0.0)
    attn = {"alibi": max_bias > 0, "alibi_bias_max": max_bias, "clip_qkv": file.keys.get("attention.clamp_kqv")}
    return {"attn_config": attn}


def _dbrx(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    attn = {
        "kv_n_heads": values["num_key_value_heads"],
        "clip_qkv": values.get("clip_qkv"),
        "rope_theta": values["rope_parameters"]["rope_theta"],
    }
    ffn = {
        "ffn_hidden_size": values["intermediate_size"],
        "moe_num_experts": values["num_experts"],
        "moe_top_k": values["num_experts_per_tok"],
    }
    return {"attn_config": attn, "ffn_config": ffn, "head_dim": None}


def _apertus(file: GGUFFile, _: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of the activation are lists of numbers, one for each layer."""
    lists = [file.metadata.get(f"xielu.alpha_{name}") for name in "pn"]
    if not all(isinstance(values, list) for values in lists):
        raise ModelError(f"{file.keys.file} lacks xielu.alpha_p or xielu.alpha_n")
    return {"hidden_act": "xielu", "xielu_alphas": list(zip(*lists, strict=True))}


def _exaone(_: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"layer_norm_epsilon": values["rms_norm_eps"]}


def _mimo2(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    keys, num_layers = file.keys, values["num_hidden_layers"]
    kinds = [SLIDING if slides else FULL for slides in keys["attention.sliding_window_pattern"]][:num_layers]
    kv_heads = keys["attention.head_count_kv"]
    num_full = kv_heads[kinds.index(FULL)] if isinstance(kv_heads, list) else kv_heads
    ropes = _two_ropes(file, values, 10_000.0, 5_000_000.0)["rope_parameters"]
    return {
        "rope_parameters": {kind: {**values["rope_parameters"], **rope} for kind, rope in ropes.items()},
        "layer_types": kinds,
        "num_key_value_heads": num_full,
        "v_head_dim": keys.size("attention.value_length"),
        "attention_value_scale": keys.number("attention.value_scale", 1.0),
        "norm_topk_prob": True,
        "n_group": 1,
    }


def _mistral4(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    return {**_latent(file, values), **_mistral3(file, values)}


def _latent(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    keys, rope_dim = file.keys, file.keys.size("rope.dimension_count")
    key_length = keys.size("attention.key_length_mla", keys.get("attention.key_length"))
    value_length = keys.get("attention.value_length_mla", keys.get("attention.value_length"))
    found = {
        "q_lora_rank": values.get("q_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key_length - rope_dim,
        "head_dim": None,
    }
    return found if value_length is None else {**found, "v_head_dim": value_length}


def _deepseek2(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    found = _latent(file, values)
    if not file.keys.get("expert_count"):
        return {**found, "model_type": "youtu"}
    if "exp_probs_b.bias" in file.leaves:
        return {**found, "model_type": "deepseek_v3"}
    return {**found, "topk_method": "group_limited_greedy" if values.get("n_group", 1) > 1 else "greedy"}


def _mamba(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    rank, size = file.keys.size("ssm.time_step_rank"), file.keys.size("ssm.inner_size")
    found = {"mamba_dt_rank": rank, "time_step_rank": rank, "mamba_expand": size / values["hidden_size"]}
    if file.arch == "mamba":
        found |= {"intermediate_size": size, "use_bias": False}
        found |= {"model_type": "falcon_mamba"} if file.keys.boolean("ssm.dt_b_c_rms", False) else {}
    return found


def _mamba2(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    num_heads, size = file.keys.size("ssm.time_step_rank"), file.keys.size("ssm.inner_size")
    found = {
        **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), num_heads),
        **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), size // num_heads),
        "mamba_expand": size / values["hidden_size"],
        "mamba_d_ssm": size,
    }
    return {**found, "num_heads": num_heads, "head_dim": size // num_heads} if file.arch == "mamba2" else found


def _nemotron_h(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    kinds = (("ssm_in", "mamba"), ("attn_q", "attention"), ("ffn_gate_inp", "moe"), ("ffn_up", "mlp"))
    layers = []
    for i in range(values["num_hidden_layers"]):
        found = [kind for leaf, kind in kinds if f"blk.{i}.{leaf}.weight" in file.names]
        if not found:
            raise ModelError(f"layer {i} of {file.keys.file} has none of {', '.join(leaf for leaf, _ in kinds)}")
        layers.append(found[0])
    eps = file.keys.number("attention.layer_norm_rms_epsilon", values.get("layer_norm_eps", 1e-5))
    return {**_mamba2(file, values), "layers_block_type": layers, "layer_types": None, "layer_norm_epsilon": eps}


def _lfm2(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"block_auto_adjust_ff_dim": False, "use_expert_bias": "exp_probs_b.bias" in file.leaves}


def _falcon_h1(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Multipliers are part of the weights."""
    return {
        **_mamba2(file, values),
        "mamba_rms_norm": "ssm_norm.weight" in file.leaves,
        "layer_types": None,
        "mamba_norm_before_gate": False,
        "layers_block_type": None,
    }


def _delta(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    num_heads, size = file.keys.size("ssm.time_step_rank"), file.keys.size("ssm.inner_size")
    return {"linear_num_value_heads": num_heads, "linear_value_head_dim": size // num_heads, "norm_topk_prob": True}


def _tiled_delta(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """llama.cpp stores heads of values in turn of the keys that they read, which are then as many: repeated."""
    return {**_delta(file, values), "linear_num_key_heads": file.keys.size("ssm.time_step_rank")}


def _kimi(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    linear = {
        "head_dim": file.keys.size("kda.head_dim"),
        "num_heads": values["num_attention_heads"],
        "short_conv_kernel_size": file.keys.size("ssm.conv_kernel"),
    }
    return {
        **_latent(file, values),
        "linear_attn_config": linear,
        "n_group": values.get("n_group", 1),
        "norm_topk_prob": True,
    }


def _bert(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Positions of RoBERTa's descendants are stored from the first that is read."""
    rows = file.num_token_types if "token_types.weight" in file.names else 0
    return {"type_vocab_size": rows, "rope_theta": file.keys.get("rope.freq_base"), "head_dim": None}


def _modern_bert(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    keys = file.keys
    return {
        "local_attention": keys.size("attention.sliding_window"),
        "global_attn_every_n_layers": keys.size("attention.sliding_window_pattern", 3),
        "hidden_activation": keys.text("hidden_act", "gelu"),
        **_two_ropes(file, values, keys.number("rope.freq_base", 160_000.0), 160_000.0),
    }


def _t5(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    is_gated, by_layer = "enc.blk.0.ffn_gate.weight" in file.names, "enc.blk.1.attn_rel_b.weight" in file.names
    return {
        "model_type": "umt5" if by_layer else "t5",
        "feed_forward_proj": "gated-gelu" if is_gated else "relu",
        "d_kv": values["head_dim"],
        "num_decoder_layers": file.keys.size("decoder_block_count", values["num_layers"]),
        "relative_attention_num_buckets": file.keys.size("attention.relative_buckets_count"),
    }


def _shared_keys(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """What Gemma 3n and 4 share."""
    return {
        "hidden_size_per_layer_input": file.keys.integer("embedding_length_per_layer_input", 0),
        "num_kv_shared_layers": file.keys.integer("attention.shared_kv_layers", 0),
        "final_logit_softcapping": values.get("final_logit_softcapping"),
    }


def _gemma3n(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    keys, scales = file.keys, file.keys.get("activation_sparsity_scale") or ()
    return {
        **_shared_keys(file, values),
        **_two_ropes(file, values, 10_000.0, 1_000_000.0),
        "laurel_rank": file.rows("blk.0.laurel_l.weight"),
        "altup_num_inputs": keys.size("altup.num_inputs", 4),
        "altup_active_idx": keys.integer("altup.active_idx", 0),
        # Files hold how many standard deviations are cut off, 0 or minus infinity for none.
        "activation_sparsity_pattern": [NormalDist().cdf(x) if x > -math.inf else 0.0 for x in scales],
    }


def _gemma4(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    keys, kinds = file.keys, values["layer_types"]
    sizes, kv_heads = (
        [value] * len(kinds) if isinstance(value, int) else list(value)
        for value in (values["intermediate_size"], values["num_key_value_heads"])
    )
    factors = read_factors("rope_freqs", file.read)
    full, sliding = kinds.index(FULL), kinds.index(SLIDING)
    ropes = {
        FULL: {
            "rope_type": "proportional",
            "partial_rotary_factor": sum(factor == 1.0 for factor in factors) / len(factors),
            "rope_theta": keys.number("rope.freq_base", 1_000_000.0),
        },
        SLIDING: {"rope_theta": keys.number("rope.freq_base_swa", 10_000.0)},
    }
    return {
        **_shared_keys(file, values),
        "rope_parameters": ropes,
        "head_dim": keys.size("attention.key_length_swa"),
        "global_head_dim": keys.size("attention.key_length"),
        "num_key_value_heads": kv_heads[sliding],
        "num_global_key_value_heads": kv_heads[full],
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": sizes[-1] == 2 * sizes[0],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.names,
        "enable_moe_block": "ffn_gate_inp.weight" in file.leaves,
    }


def _mistral3(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    rope, keys = values["rope_parameters"], file.keys
    more = {
        "attention_factor": None,
        "mscale": 1.0,
        "mscale_all_dim": keys.number("rope.scaling.yarn_log_multiplier", 0.0),
        "llama_4_scaling_beta": keys.number("attention.temperature_scale", 0.0),
    }
    return {"rope_parameters": {**rope, **more}}


def _llama4(file: GGUFFile, _: Mapping[str, Any]) -> dict[str, Any]:
    """Maverick's heads are not normalised."""
    return {"use_qk_norm": file.keys.get("expert_count") != 128}


SPECIAL: Mapping[str, Callable[[GGUFFile, Mapping[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "gemma-embedding": _gemma,
    "granite": _granite,
    "granitemoe": _granite,
    "granitehybrid": _granite_hybrid,
    "minicpm": _minicpm,
    "exaone": _exaone,
    "apertus": _apertus,
    "mimo2": _mimo2,
    "mistral4": _mistral4,
    "glm-dsa": _latent,
    "command-r": _cohere,
    "cohere2": _cohere,
    "stablelm": _stablelm,
    "olmo2": _olmo2,
    "qwen2moe": _qwen2_moe,
    "gpt-oss": _gpt_oss,
    "falcon": _falcon,
    "starcoder": _bigcode,
    "mpt": _mpt,
    "dbrx": _dbrx,
    "deepseek2": _deepseek2,
    "minicpm3": _latent,
    "mamba": _mamba,
    "jamba": _mamba,
    "mamba2": _mamba2,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "falcon-h1": _falcon_h1,
    "qwen3next": _delta,
    "qwen35": _tiled_delta,
    "qwen35moe": _tiled_delta,
    "kimi-linear": _kimi,
    "mistral3": _mistral3,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "bert": _bert,
    "nomic-bert": _bert,
    "modern-bert": _modern_bert,
    "t5": _t5,
    "llama4": _llama4,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2,
}
"""Architecture -> what its files mean, beside what all say."""
