"""What files of single architectures leave unsaid, or say in a way of their own: keys of config.json."""

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from ..errors import ModelError
from .gguf_file import GGUFFile, read_factors
from .llama_like import FULL, SLIDING

_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""Gemma's largest models scale scores by hidden_size / num_heads instead of head_dim; GGUF does not say so, and
llama.cpp knows them by their number of layers."""


def llama(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    if file.keys.get("expert_count"):
        return {"model_type": "mixtral"}
    return {"model_type": "mistral"} if values["sliding_window"] else {}


def gemma2(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    is_27b = file.keys["block_count"] == _LAYERS_OF_27B.get(file.arch)
    head_dim = values["hidden_size"] // values["num_attention_heads"] if is_27b else values["head_dim"]
    return {"query_pre_attn_scalar": head_dim}


def gemma3(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    return {**gemma2(file, values), **two_ropes(file, values)}


def two_ropes(
    file: GGUFFile, values: Mapping[str, Any], *, sliding: float = 10_000.0, full: float = 1_000_000.0
) -> dict[str, Any]:
    """Parameters of rope for each type of layer; those that slide are not stretched."""
    return {
        "rope_parameters": {
            FULL: {**values["rope_parameters"], "rope_theta": file.keys.number("rope.freq_base", full)},
            SLIDING: {"rope_theta": file.keys.number("rope.freq_base_swa", sliding)},
        }
    }


def minicpm(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Early files leave out the multipliers, which are those of MiniCPM 1."""
    return {
        "residual_multiplier": values.get("residual_multiplier", 1.4 / values["num_hidden_layers"] ** 0.5),
        "logits_scaling": values.get("logits_scaling", values["hidden_size"] / 256),
    }


def granite_hybrid(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    has_rope = file.keys.boolean("rope.scaling.finetuned", False)
    found = {"position_embedding_type": "rope" if has_rope else "nope"}
    if file.keys.get("expert_count"):
        return found
    return {**found, "num_local_experts": 0, "shared_intermediate_size": values["intermediate_size"]}


def qwen2_moe(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Early files leave out sizes of experts."""
    size = file.keys.size("feed_forward_length")
    own = values.get("moe_intermediate_size") or size // file.keys.size("expert_used_count")
    return {
        "moe_intermediate_size": own,
        "shared_expert_intermediate_size": values.get("shared_expert_intermediate_size", size),
    }


def falcon(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    num_kv_heads, has_two = file.keys.integer("attention.head_count_kv", 1), "attn_norm_2.weight" in file.leaves
    is_new = has_two or num_kv_heads > 1
    return {"new_decoder_architecture": is_new, "num_ln_in_parallel_attn": 2 if has_two else 1}


def mpt(file: GGUFFile, _: Mapping[str, Any]) -> dict[str, Any]:
    max_bias = file.keys.number("attention.max_alibi_bias", 0.0)
    attn = {"alibi": max_bias > 0, "alibi_bias_max": max_bias, "clip_qkv": file.keys.get("attention.clamp_kqv")}
    return {"attn_config": attn}


def dbrx(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
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


def apertus(file: GGUFFile, _: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of the activation are lists of numbers, one for each layer."""
    lists = [file.metadata.get(f"xielu.alpha_{name}") for name in "pn"]
    if not all(isinstance(values, list) for values in lists):
        raise ModelError(f"{file.keys.file} lacks xielu.alpha_p or xielu.alpha_n")
    return {"hidden_act": "xielu", "xielu_alphas": list(zip(*lists, strict=True))}


def mimo2(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    keys, num_layers = file.keys, values["num_hidden_layers"]
    kinds = [SLIDING if slides else FULL for slides in keys["attention.sliding_window_pattern"]][:num_layers]
    kv_heads = keys["attention.head_count_kv"]
    num_full = kv_heads[kinds.index(FULL)] if isinstance(kv_heads, list) else kv_heads
    ropes = two_ropes(file, values, full=5_000_000.0)["rope_parameters"]
    return {
        "rope_parameters": {kind: {**values["rope_parameters"], **rope} for kind, rope in ropes.items()},
        "layer_types": kinds,
        "num_key_value_heads": num_full,
    }


def deepseek2(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    if not file.keys.get("expert_count"):
        return {"model_type": "youtu"}
    # Not what the file says: the first so many of GLM-4.7-Flash are dense by a list.
    dense = {"first_k_dense_replace": [*values["mlp_layer_types"], "sparse"].index("sparse")}
    if "exp_probs_b.bias" in file.leaves:
        return {"model_type": "deepseek_v3", **dense}
    return {**dense, "topk_method": "group_limited_greedy" if values.get("n_group", 1) > 1 else "greedy"}


def nemotron_h(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    kinds = (("ssm_in", "mamba"), ("attn_q", "attention"), ("ffn_gate_inp", "moe"), ("ffn_up", "mlp"))
    layers = []
    for i in range(values["num_hidden_layers"]):
        found = [kind for leaf, kind in kinds if f"blk.{i}.{leaf}.weight" in file.names]
        if not found:
            raise ModelError(f"layer {i} of {file.keys.file} has none of {', '.join(leaf for leaf, _ in kinds)}")
        layers.append(found[0])
    return {"layers_block_type": layers}


def t5(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    is_gated, by_layer = "enc.blk.0.ffn_gate.weight" in file.names, "enc.blk.1.attn_rel_b.weight" in file.names
    return {
        "model_type": "umt5" if by_layer else "t5",
        "feed_forward_proj": "gated-gelu" if is_gated else "relu",
        "d_kv": values["head_dim"],
    }


def gemma3n(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    scales = file.keys.get("activation_sparsity_scale") or ()
    return {
        **two_ropes(file, values),
        "laurel_rank": file.rows("blk.0.laurel_l.weight"),
        # Files hold how many standard deviations are cut off, 0 or minus infinity for none.
        "activation_sparsity_pattern": [NormalDist().cdf(x) if x > -math.inf else 0.0 for x in scales],
    }


def gemma4(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
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


def mistral3(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    rope, keys = values["rope_parameters"], file.keys
    more = {
        "attention_factor": None,
        "mscale": 1.0,
        "mscale_all_dim": keys.number("rope.scaling.yarn_log_multiplier", 0.0),
        "llama_4_scaling_beta": keys.number("attention.temperature_scale", 0.0),
    }
    return {"rope_parameters": {**rope, **more}}
