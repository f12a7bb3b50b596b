"""GGUF metadata as the config.json that transformers would have."""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from ..errors import ModelError
from ..suggest import did_you_mean
from ..weights.source import HostTensor
from .config import HFConfig
from .gguf_archs import ARCHS, FLAGS, KEYS
from .llama_like import FULL, SLIDING
from .spec import ModelSpec, PoolerSpec, Pooling

_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""Gemma's largest models scale scores by hidden_size / num_heads instead of head_dim; GGUF does not say so, and
llama.cpp knows them by their number of layers."""
_EARLY_GEMMA2 = {
    "sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
}  # fmt: skip
"""What early Gemma 2 files leave out."""
_BY_LAYER = (
    ("gemma3n", "feed_forward_length"), ("gemma4", "feed_forward_length"), ("gemma4", "attention.head_count_kv"),
)  # fmt: skip
"""What families take as a list with a number for each layer."""
_DTYPES = {1: "float16", 32: "bfloat16"}
"""general.file_type of unquantized files; all others compute in float32."""
_MIXERS = ("ssm_conv1d", "ssm_conv1d_q", "shortconv.conv")
"""Tensors of recurrent layers."""

_POOLING: Mapping[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}

ReadTensor = Callable[[str], HostTensor]


@dataclass(frozen=True, slots=True)
class _File:
    """What a file says. keys: its metadata without the architecture's prefix. leaves: names of tensors without
    their layer."""

    arch: str
    keys: HFConfig
    names: frozenset[str]
    leaves: frozenset[str]
    read: ReadTensor | None
    num_token_types: int

    def has(self, *leaves: str) -> bool:
        """True if any layer has one of these tensors."""
        return not self.leaves.isdisjoint(leaves)

    def rows(self, name: str) -> int:
        """Rows of a tensor."""
        assert self.read is not None
        return self.read(name).shape[0]


def config_from_gguf(
    metadata: Mapping[str, Any], tensor_names: Collection[str], read: ReadTensor | None = None
) -> HFConfig:
    """The config of the model in a GGUF file, for the family of the same architecture.

    read: reads one tensor (a WeightSource's `read`). Llama 3's and Phi-3's rope scaling is stored as tensors of
    factors (rope_freqs.weight, rope_factors_short.weight and _long), so such a file cannot do without it.
    Raises ModelError for an architecture, a rope scaling or a value that is not served.
    """
    file = _open(metadata, tensor_names, read)
    arch, keys = ARCHS[file.arch], file.keys
    values = _Values(keys.file)
    values |= {
        "model_type": arch.model_type,
        "vocab_size": keys.integer("vocab_size", 0) or len(metadata.get("tokenizer.ggml.tokens", ())) or None,
        "tie_word_embeddings": "output.weight" not in file.names,
        "dtype": _DTYPES.get(metadata.get("general.file_type", 0), "float32"),
        **arch.values,
    }
    for leaves, ours in FLAGS.items():
        values |= dict.fromkeys(ours.split(), file.has(*leaves.split()))
    for theirs, ours in (*KEYS.items(), *arch.keys.items()):
        if (value := keys.get(theirs)) is not None:
            values |= dict.fromkeys(ours.split(), value)
    values |= _positions(file)
    values |= _layers(file)
    if file.arch in _SPECIAL:
        values |= _SPECIAL[file.arch](file, values)
    return HFConfig(values, file=keys.file)


class _Values(dict[str, Any]):
    """Keys of a config so far; one that the file's metadata did not give is an error that says so."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self._file = file

    def __missing__(self, key: str) -> Any:
        raise ModelError(
            f"{self._file} gives no {key}; the file lacks a key, or has a 0 in one",
            remedies=["download the file again"],
        )


def _open(metadata: Mapping[str, Any], names: Collection[str], read: ReadTensor | None) -> _File:
    arch = str(metadata.get("general.architecture"))
    if arch not in ARCHS:
        raise ModelError(
            f"GGUF architecture {arch!r} is not served{did_you_mean(arch, ARCHS)}",
            remedies=[f"take a model of one of these: {', '.join(ARCHS)}"],
        )
    prefix = f"{arch}."
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(value := values.get(key), list) and (arch, key) not in _BY_LAYER:
            values[key] = _uniform(f"{prefix}{key}", value) or None
    leaves = frozenset(name.split(".", 2)[2] for name in names if name.startswith("blk."))
    keys = HFConfig(values, file=f"the GGUF metadata of {arch}")
    num_types = int(metadata.get("tokenizer.ggml.token_type_count", 2))
    return _File(arch, keys, frozenset(names), leaves, read, num_types)


def _uniform(key: str, values: list[int]) -> int:
    """One number for a list with a number for each layer, if they are equal where a layer has any."""
    stated = sorted({value for value in values if value})
    if len(stated) > 1:
        raise ModelError(f"{key} differs from layer to layer, which is not served: {values}")
    return stated[0] if stated else 0


def _positions(file: _File) -> dict[str, Any]:
    """Sizes of heads, rope, and which layers slide."""
    keys, num_heads = file.keys, file.keys.integer("attention.head_count", 0)
    if not num_heads:
        return {}
    if (hidden_size := keys.size("embedding_length")) < num_heads and "attention.key_length" not in keys:
        raise ModelError(
            f"{keys.file} has {num_heads} heads (attention.head_count) for embedding_length {hidden_size}"
        )
    head_dim = keys.size("attention.key_length", hidden_size // num_heads)
    values: dict[str, Any] = {"head_dim": head_dim}
    if keys.get("attention.head_count_kv") is None:
        values["num_key_value_heads"] = num_heads
    if "attention.kv_lora_rank" not in keys:
        if keys.size("attention.value_length", head_dim) != head_dim:
            raise ModelError(f"keys and values of {keys.file} differ in size, which {file.arch} does not serve")
    else:
        head_dim = keys.size("rope.dimension_count")
    values["rope_parameters"] = _rope(file, head_dim)
    window, pattern = keys.integer("attention.sliding_window", 0), keys.get("attention.sliding_window_pattern")
    values["sliding_window"] = window or None
    if window and isinstance(pattern, list):
        values["layer_types"] = [SLIDING if slides else FULL for slides in pattern]
    elif window and pattern:
        values["sliding_window_pattern"] = pattern
    return values


def _layers(file: _File) -> dict[str, Any]:
    """Which layers are recurrent and which have experts, and how many there are without those that predict more."""
    num_layers = file.keys.num_layers("block_count") - file.keys.integer("nextn_predict_layers", 0)
    layers = range(num_layers)
    values: dict[str, Any] = dict.fromkeys(KEYS["block_count"].split(), num_layers)
    if "ffn_gate_inp.weight" in file.leaves:
        is_sparse = [f"blk.{i}.ffn_gate_inp.weight" in file.names for i in layers]
        values["mlp_layer_types"] = ["sparse" if flag else "dense" for flag in is_sparse]
    has_mixer = [not file.names.isdisjoint(f"blk.{i}.{leaf}.weight" for leaf in _MIXERS) for i in layers]
    if any(has_mixer):
        values["layer_types"] = ["linear_attention" if flag else "full_attention" for flag in has_mixer]
        values["layers_block_type"] = values["layer_types"]
    return values


# ---- what single architectures leave unsaid -----------------------------------------------------------------------
def _llama(file: _File, values: Mapping[str, Any]) -> dict[str, Any]:
    if file.keys.get("expert_count"):
        return {"model_type": "mixtral"}
    return {"model_type": "mistral"} if values["sliding_window"] else {}


def _gemma(file: _File, values: Mapping[str, Any]) -> dict[str, Any]:
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


def _two_ropes(file: _File, values: Mapping[str, Any], sliding: float, full: float) -> dict[str, Any]:
    """Parameters of rope for each type of layer; those that slide are not stretched."""
    return {
        "rope_parameters": {
            FULL: {**values["rope_parameters"], "rope_theta": file.keys.number("rope.freq_base", full)},
            SLIDING: {"rope_theta": file.keys.number("rope.freq_base_swa", sliding)},
        }
    }


def _granite(file: _File, values: Mapping[str, Any]) -> dict[str, Any]:
    scale = values.get("attention_multiplier", values.get("head_dim", 1) ** -0.5)  # as llama.cpp has it
    return {"attention_multiplier": scale, "logits_scaling": file.keys.number("logit_scale", 1.0)}


def _granite_hybrid(file: _File, values: Mapping[str, Any]) -> dict[str, Any]:
    found = {**_granite(file, values), **_mamba2(file, values)}
    if not file.keys.get("expert_count"):
        found |= {"num_local_experts": 0, "shared_intermediate_size": values["intermediate_size"]}
    has_rope = file.keys.boolean("rope.scaling.finetuned", False)
    return {**found, "position_embedding_type": "rope" if has_rope else "nope"}


def _cohere(file: _File, _: Mapping[str, Any]) -> dict[str, Any]:
    return {"logit_scale": file.keys.number("logit_scale", 1.0)}


def _stablelm(file: _File, _: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_parallel_residual": "ffn_norm.weight" not in file.leaves}


def _olmo2(_: _File, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"model_type": "olmo3"} if values["sliding_window"] else {}


def _qwen2_moe(file: _File, values: Mapping[str, Any]) -> dict[str, Any]:
    """Early files leave out sizes of experts."""
    size = file.keys.size("feed_forward_length")
    own = values.get("moe_intermediate_size") or size // file.keys.size("expert_used_count")
    return {
        "moe_intermediate_size": own,
        "shared_expert_intermediate_size": values.get("shared_expert_intermediate_size", size),
    }


def _gpt_oss(_: _File, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {**values["rope_parameters"], "truncate": False}}


def _falcon(file: _File, values: Mapping[str, Any]) -> dict[str, Any]:
    num_kv_heads, has_two = file.keys.integer("attention.head_count_kv", 1), "attn_norm_2.weight" in file.leaves
    is_new = has_two or num_kv_heads > 1
    return {"new_decoder_architecture": is_new, "num_ln_in_parallel_attn": 2 if has_two else 1}


def _bigcode(file: _File, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"multi_query": file.keys.integer("attention.head_count_kv", 1) == 1}


def _mpt(file: _File, _: Mapping[str, Any]) -> dict[str, Any]:
    max_bias = file.keys.number("attention.max_alibi_bias", 0.0)
    attn = {"alibi": max_bias > 0, "alibi_bias_max": max_bias, "clip_qkv": file.keys.get("attention.clamp_kqv")}
    return {"attn_config": attn}


def _dbrx(file: _File, values: Mapping[str, Any]) -> dict[str, Any]:
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


def _latent(file: _File, values: Mapping[str, Any]) -> dict[str, Any]:
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


def _deepseek2(file: _File, values: Mapping[str, Any]) -> dict[str, Any]:
    found = _latent(file, values)
    if not file.keys.get("expert_count"):
        return {**found, "model_type": "youtu"}
    if "exp_probs_b.bias" in file.leaves:
        return {**found, "model_type": "deepseek_v3"}
    return {**found, "topk_method": "group_limited_greedy" if values.get("n_group", 1) > 1 else "greedy"}


def _mamba(file: _File, values: Mapping[str, Any]) -> dict[str, Any]:
    rank, size = file.keys.size("ssm.time_step_rank"), file.keys.size("ssm.inner_size")
    found = {"mamba_dt_rank": rank, "time_step_rank": rank, "mamba_expand": size / values["hidden_size"]}
    if file.arch == "mamba":
        found |= {"intermediate_size": size, "use_bias": False}
        found |= {"model_type": "falcon_mamba"} if file.keys.boolean("ssm.dt_b_c_rms", False) else {}
    return found


def _mamba2(file: _File, values: Mapping[str, Any]) -> dict[str, Any]:
    num_heads, size = file.keys.size("ssm.time_step_rank"), file.keys.size("ssm.inner_size")
    found = {
        **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), num_heads),
        **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), size // num_heads),
        "mamba_expand": size / values["hidden_size"],
        "mamba_d_ssm": size,
    }
    return {**found, "num_heads": num_heads, "head_dim": size // num_heads} if file.arch == "mamba2" else found


def _nemotron_h(file: _File, values: Mapping[str, Any]) -> dict[str, Any]:
    kinds = (("ssm_in", "mamba"), ("attn_q", "attention"), ("ffn_gate_inp", "moe"), ("ffn_up", "mlp"))
    layers = []
    for i in range(values["num_hidden_layers"]):
        found = [kind for leaf, kind in kinds if f"blk.{i}.{leaf}.weight" in file.names]
        if not found:
            raise ModelError(f"layer {i} of {file.keys.file} has none of {', '.join(leaf for leaf, _ in kinds)}")
        layers.append(found[0])
    eps = file.keys.number("attention.layer_norm_rms_epsilon", values.get("layer_norm_eps", 1e-5))
    return {**_mamba2(file, values), "layers_block_type": layers, "layer_types": None, "layer_norm_epsilon": eps}


def _lfm2(file: _File, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"block_auto_adjust_ff_dim": False, "use_expert_bias": "exp_probs_b.bias" in file.leaves}


def _falcon_h1(file: _File, values: Mapping[str, Any]) -> dict[str, Any]:
    """Multipliers are part of the weights."""
    return {
        **_mamba2(file, values),
        "mamba_rms_norm": "ssm_norm.weight" in file.leaves,
        "layer_types": None,
        "mamba_norm_before_gate": False,
        "layers_block_type": None,
    }


def _delta(file: _File, values: Mapping[str, Any]) -> dict[str, Any]:
    num_heads, size = file.keys.size("ssm.time_step_rank"), file.keys.size("ssm.inner_size")
    return {"linear_num_value_heads": num_heads, "linear_value_head_dim": size // num_heads, "norm_topk_prob": True}


def _tiled_delta(file: _File, values: Mapping[str, Any]) -> dict[str, Any]:
    """llama.cpp stores heads of values in turn of the keys that they read, which are then as many: repeated."""
    return {**_delta(file, values), "linear_num_key_heads": file.keys.size("ssm.time_step_rank")}


def _kimi(file: _File, values: Mapping[str, Any]) -> dict[str, Any]:
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


def _bert(file: _File, values: Mapping[str, Any]) -> dict[str, Any]:
    """Positions of RoBERTa's descendants are stored from the first that is read."""
    rows = file.num_token_types if "token_types.weight" in file.names else 0
    return {"type_vocab_size": rows, "rope_theta": file.keys.get("rope.freq_base"), "head_dim": None}


def _modern_bert(file: _File, values: Mapping[str, Any]) -> dict[str, Any]:
    keys = file.keys
    return {
        "local_attention": keys.size("attention.sliding_window"),
        "global_attn_every_n_layers": keys.size("attention.sliding_window_pattern", 3),
        "hidden_activation": keys.text("hidden_act", "gelu"),
        **_two_ropes(file, values, keys.number("rope.freq_base", 160_000.0), 160_000.0),
    }


def _t5(file: _File, values: Mapping[str, Any]) -> dict[str, Any]:
    is_gated, by_layer = "enc.blk.0.ffn_gate.weight" in file.names, "enc.blk.1.attn_rel_b.weight" in file.names
    return {
        "model_type": "umt5" if by_layer else "t5",
        "feed_forward_proj": "gated-gelu" if is_gated else "relu",
        "d_kv": values["head_dim"],
        "num_decoder_layers": file.keys.size("decoder_block_count", values["num_layers"]),
        "relative_attention_num_buckets": file.keys.size("attention.relative_buckets_count"),
    }


def _shared_keys(file: _File, values: Mapping[str, Any]) -> dict[str, Any]:
    """What Gemma 3n and 4 share."""
    return {
        "hidden_size_per_layer_input": file.keys.integer("embedding_length_per_layer_input", 0),
        "num_kv_shared_layers": file.keys.integer("attention.shared_kv_layers", 0),
        "final_logit_softcapping": values.get("final_logit_softcapping"),
    }


def _gemma3n(file: _File, values: Mapping[str, Any]) -> dict[str, Any]:
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


def _gemma4(file: _File, values: Mapping[str, Any]) -> dict[str, Any]:
    keys, kinds = file.keys, values["layer_types"]
    sizes, kv_heads = (
        [value] * len(kinds) if isinstance(value, int) else list(value)
        for value in (values["intermediate_size"], values["num_key_value_heads"])
    )
    factors = _factors("rope_freqs", file.read)
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


def _mistral3(file: _File, values: Mapping[str, Any]) -> dict[str, Any]:
    rope, keys = values["rope_parameters"], file.keys
    more = {
        "attention_factor": None,
        "mscale": 1.0,
        "mscale_all_dim": keys.number("rope.scaling.yarn_log_multiplier", 0.0),
        "llama_4_scaling_beta": keys.number("attention.temperature_scale", 0.0),
    }
    return {"rope_parameters": {**rope, **more}}


def _llama4(file: _File, _: Mapping[str, Any]) -> dict[str, Any]:
    """Maverick's heads are not normalised."""
    return {"use_qk_norm": file.keys.get("expert_count") != 128}


_SPECIAL: Mapping[str, Callable[[_File, Mapping[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "gemma-embedding": _gemma,
    "granite": _granite,
    "granitemoe": _granite,
    "granitehybrid": _granite_hybrid,
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


def _rope(file: _File, head_dim: int) -> dict[str, Any]:
    keys = file.keys
    rotary_dim = keys.size("rope.dimension_count", head_dim)
    values: dict[str, Any] = {
        "rope_type": keys.text("rope.scaling.type", "none"),
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
        # The quarter keeps int(head_dim * factor) at rotary_dim, whatever the division rounds to.
        "partial_rotary_factor": 1.0 if rotary_dim == head_dim else (rotary_dim + 0.25) / head_dim,
        "heeds_partial_rotary_factor": True,
    }
    scale = keys.number("rope.scaling.factor", keys.get("rope.scale_linear", 0.0))
    length = keys.size("rope.scaling.original_context_length", keys.size("context_length"))
    attention_factor = keys.number("rope.scaling.attn_factor", 1.0)
    factors = [name for name in ("rope_freqs", "rope_factors_long") if f"{name}.weight" in file.names]
    if values["rope_type"] == "none":
        values["rope_type"] = "linear" if scale not in (0.0, 1.0) else "default"
    if factors:
        if values["rope_type"] not in ("default", "longrope"):
            raise ModelError(f"{keys.file} scales rope both by {values['rope_type']} and by the tensor {factors[0]}")
        # Llama 3's factors divide the frequencies of every request: LongRoPE whose two variants are one.
        long = _factors(factors[0], file.read)
        is_longrope = factors == ["rope_factors_long"]
        values |= {
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": _factors("rope_factors_short", file.read) if is_longrope else long,
            "factor": 1.0,
            "attention_factor": attention_factor,
            "original_max_position_embeddings": length,
        }
    elif values["rope_type"] == "longrope":
        raise ModelError(f"{keys.file} asks for LongRoPE, but the file has no tensor rope_factors_long.weight")
    elif values["rope_type"] == "yarn":
        log_multiplier = keys.number("rope.scaling.yarn_log_multiplier", 0.0) / 0.1
        values |= {
            "original_max_position_embeddings": length,
            "beta_fast": keys.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": keys.get("rope.scaling.yarn_beta_slow"),
            # llama.cpp multiplies the stated factor by YaRN's own.
            "attention_factor": attention_factor * (1 + 0.1 * math.log(max(scale, 1.0))),
        }
        if log_multiplier:  # DeepSeek's: of scores, not of cosines and sines
            values |= {"attention_factor": None, "mscale": log_multiplier, "mscale_all_dim": log_multiplier}
    return {**values, "factor": scale} if values["rope_type"] in ("linear", "yarn") else values


def _factors(name: str, read: ReadTensor | None) -> list[float]:
    if read is None:
        raise ModelError(f"the rope scaling of this GGUF file is in the tensor {name}.weight, which was not given")
    tensor = read(f"{name}.weight")
    if tensor.dtype != "float32":
        raise ModelError(f"{name}.weight must be float32, got {tensor.dtype}")
    return [float(value) for value in tensor.data.reshape(-1)]


def with_gguf_pooler(spec: ModelSpec, metadata: Mapping[str, Any]) -> ModelSpec:
    """The spec with embeddings as a file asks for them, of length 1 as llama.cpp gives them. Raises ModelError."""
    pooling = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0)
    if not pooling:
        return spec
    if pooling not in _POOLING:
        raise ModelError(f"this GGUF file is a classifier (pooling_type {pooling}), which is served from safetensors")
    return dataclasses.replace(spec, pooler=PoolerSpec(kind=_POOLING[pooling], normalize=True))
