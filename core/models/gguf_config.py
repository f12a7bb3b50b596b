"""GGUF metadata as the config.json that transformers would have, and llama.cpp's tensor names."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ..errors import ModelError
from ..suggest import did_you_mean
from ..weights.names import NameTable, Stored
from ..weights.source import HostTensor
from .config import HFConfig
from .llama_like import FULL, SLIDING
from .spec import ModelSpec

MODEL_TYPES: Mapping[str, str] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "granite": "granite",
    "gpt2": "gpt2",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "olmoe": "olmoe",
    "gpt-oss": "gpt_oss",
    "gemma": "gemma",
    "command-r": "cohere",
    "starcoder2": "starcoder2",
    "stablelm": "stablelm",
    "nemotron": "nemotron",
    "phi2": "phi",
    "glm4": "glm4",
}
"""general.architecture -> model_type. Mistral and Mixtral ship as llama."""
_MIXTURES = ("qwen2moe", "qwen3moe", "olmoe", "gpt-oss")
_LAYER_NORM_KEYS = {
    "command-r": "layer_norm_eps",
    "starcoder2": "norm_epsilon",
    "stablelm": "layer_norm_eps",
    "nemotron": "norm_eps",
    "phi2": "layer_norm_eps",
}
"""config.json's name of the epsilon, of architectures with layer norms."""

_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""Gemma's largest models scale scores by hidden_size / num_heads instead of head_dim; GGUF does not say so, and
llama.cpp knows them by their number of layers."""
_GEMMA2_DEFAULTS = {
    "attention.sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
"""What early Gemma 2 files leave out."""
_GRANITE_KEYS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
"""Granite's multipliers in config.json and in GGUF."""
_PLAIN_NAMES = (
    ("attn_norm", "attn_norm", 0),
    ("attn.q_norm", "attn_q_norm", 0),
    ("attn.k_norm", "attn_k_norm", 0),
    ("attn.o_proj", "attn_output", 0),
    ("attn_post_norm", "post_attention_norm", 0),
    ("mlp_norm", "ffn_norm", 0),
    ("mlp.down_proj", "ffn_down", 0),
    ("mlp_post_norm", "post_ffw_norm", 0),
)
"""(ours, llama.cpp's, heads whose rows are reordered) of what all architectures spell alike."""
_SINGLE_NAMES: Mapping[str, str] = {
    "layers.{i}.attn.sinks": "blk.{i}.attn_sinks.weight",
    "layers.{i}.mlp.shared_gate.weight": "blk.{i}.ffn_gate_inp_shexp.weight",
    **{
        f"layers.{{i}}.mlp.{ours}.{leaf}": f"blk.{{i}}.{theirs}.{leaf}"
        for leaf in ("weight", "bias")
        for ours, theirs in (
            ("router", "ffn_gate_inp"),
            *((f"experts.{{j}}.{name}_proj", f"ffn_{name}_exps.{{j}}") for name in ("gate", "up", "down")),
            *((f"shared.{name}_proj", f"ffn_{name}_shexp") for name in ("gate", "up", "down")),
        )
    },
}
"""Of mixtures, and of attention with sinks."""
_DTYPES = {1: "float16", 32: "bfloat16"}
"""general.file_type of unquantized files; all others compute in float32."""

ReadTensor = Callable[[str], HostTensor]


def config_from_gguf(
    metadata: Mapping[str, Any], tensor_names: Collection[str], read: ReadTensor | None = None
) -> HFConfig:
    """The config of the model in a GGUF file, for the family of the same architecture.

    read: reads one tensor (a WeightSource's `read`). Llama 3's and Phi-3's rope scaling is stored as tensors of
    factors (rope_freqs.weight, rope_factors_short.weight and _long), so such a file cannot do without it.
    Raises ModelError for an architecture, a rope scaling or a value that is not served.
    """
    arch = str(metadata.get("general.architecture"))
    if arch not in MODEL_TYPES:
        raise ModelError(
            f"GGUF architecture {arch!r} is not served{did_you_mean(arch, MODEL_TYPES)}",
            remedies=[f"take a model of one of these: {', '.join(MODEL_TYPES)}"],
        )
    prefix = f"{arch}."
    keys = HFConfig(
        {key.removeprefix(prefix): _uniform(key, value) for key, value in metadata.items() if key.startswith(prefix)},
        file=f"the GGUF metadata of {arch}",
    )
    common = {
        "model_type": MODEL_TYPES[arch],
        "vocab_size": keys.integer("vocab_size", 0) or len(metadata.get("tokenizer.ggml.tokens", ())) or None,
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "dtype": _DTYPES.get(metadata.get("general.file_type", 0), "float32"),
    }
    values = _gpt2(keys) if arch == "gpt2" else _llama_like(arch, keys, tensor_names, read)
    if keys.get("expert_count") or arch in _MIXTURES:
        values |= _experts(arch, keys)
    return HFConfig({**common, **values}, file=keys.file)


def gguf_names(spec: ModelSpec) -> NameTable:
    """llama.cpp's tensor names for a model of one of `MODEL_TYPES`, as UnstackedSource gives those of experts.

    Architectures llama and granite store query and key rows for interleaved rope; Gemma's norms come with the one
    added.
    """
    attn = spec.layers[0].attn
    pairs = spec.model_type in ("llama", "mistral", "mixtral", "granite")
    is_packed = spec.model_type in ("phi3", "gpt2")
    projections: tuple[tuple[str, str, int], ...] = (
        ("attn.q_proj", "attn_q", attn.num_heads if pairs else 0),
        ("attn.k_proj", "attn_k", attn.num_kv_heads if pairs else 0),
        ("attn.v_proj", "attn_v", 0),
        ("mlp.gate_proj", "ffn_gate", 0),
        ("mlp.up_proj", "ffn_up", 0),
    )
    if is_packed:
        # llama.cpp says ffn_up for Phi-3's gate and up in one.
        up = "mlp.gate_up_proj" if spec.layers[0].mlp.gated else "mlp.up_proj"
        projections = (("attn.qkv_proj", "attn_qkv", 0), (up, "ffn_up", 0))
    if spec.model_type == "glm4":
        projections = (*projections[:3], ("mlp.gate_up_proj", "ffn_up", 0))
    entries: dict[str, str | Stored] = {
        "embed_tokens.weight": "token_embd.weight",
        "embed_positions.weight": "position_embd.weight",
        "final_norm.weight": "output_norm.weight",
        "final_norm.bias": "output_norm.bias",
        "lm_head.weight": "output.weight",
        "lm_head.bias": "output.bias",
    }
    for ours, theirs, num_heads in (*projections, *_PLAIN_NAMES):
        for leaf in ("weight", "bias"):
            name = f"blk.{{i}}.{theirs}.{leaf}"
            entries[f"layers.{{i}}.{ours}.{leaf}"] = Stored(name=name, rope_pairs=num_heads)
    entries |= _SINGLE_NAMES
    if spec.model_type == "gpt_oss":
        entries["layers.{i}.mlp_norm.weight"] = "blk.{i}.post_attention_norm.weight"
    if spec.model_type == "cohere":
        for name in ("q_norm", "k_norm"):
            entries[f"layers.{{i}}.attn.{name}.weight"] = Stored(name=f"blk.{{i}}.attn_{name}.weight", stacked=True)
    return NameTable(
        entries=entries,
        base_prefix="",
        # The rope tensors are part of the config: config_from_gguf reads them.
        ignore=(r"^rope_(freqs|factors_long|factors_short)\.weight$", r"\.attn_rot_embd$"),
        adds_one=True,
    )


def _gpt2(keys: HFConfig) -> dict[str, Any]:
    return {
        "n_positions": keys.size("context_length"),
        "n_embd": keys.size("embedding_length"),
        "n_layer": keys.num_layers("block_count"),
        "n_head": keys.size("attention.head_count"),
        "n_inner": keys.size("feed_forward_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
    }


def _llama_like(arch: str, keys: HFConfig, tensor_names: Collection[str], read: ReadTensor | None) -> dict[str, Any]:
    hidden_size, num_heads = keys.size("embedding_length"), keys.size("attention.head_count")
    num_layers = keys.num_layers("block_count")
    head_dim = keys.size("attention.key_length", hidden_size // num_heads or None)
    if keys.size("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"keys and values of {keys.file} differ in size, which {arch} does not serve")
    window = keys.integer("attention.sliding_window", 0) or None
    rope = _rope(keys, head_dim, tensor_names, read)
    values: dict[str, Any] = {
        "max_position_embeddings": keys.size("context_length"),
        "hidden_size": hidden_size,
        "intermediate_size": keys.size("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.size("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rope_parameters": rope,
    }
    if arch in _LAYER_NORM_KEYS:
        values[_LAYER_NORM_KEYS[arch]] = keys.number("attention.layer_norm_epsilon")
    else:
        values["rms_norm_eps"] = keys.number("attention.layer_norm_rms_epsilon")
    if arch in ("llama", "granite"):
        values["attention_bias"] = "blk.0.attn_q.bias" in tensor_names
        values["mlp_bias"] = "blk.0.ffn_down.bias" in tensor_names
        if window and arch == "llama" and not keys.get("expert_count"):
            values |= {"model_type": "mistral", "sliding_window": window}
    elif arch == "olmo2":
        if window:
            raise ModelError(f"{keys.file} has a sliding window: it is an OLMo 3, which is not served as GGUF")
        values["attention_bias"] = "blk.0.attn_q.bias" in tensor_names
    elif arch == "phi3":
        values["sliding_window"] = window
        values["original_max_position_embeddings"] = rope.get("original_max_position_embeddings")
    elif arch in _LAYERS_OF_27B:
        keys = keys.with_defaults(**_GEMMA2_DEFAULTS) if arch == "gemma2" else keys
        is_27b = num_layers == _LAYERS_OF_27B[arch]
        values |= {
            "sliding_window": keys.size("attention.sliding_window"),
            "query_pre_attn_scalar": hidden_size // num_heads if is_27b else head_dim,
            "attn_logit_softcapping": keys.number("attn_logit_softcapping", 0.0),
            "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0),
        }
    elif arch == "command-r":
        values["attention_bias"] = "blk.0.attn_q.bias" in tensor_names
        values["use_qk_norm"] = "blk.0.attn_q_norm.weight" in tensor_names
        values["logit_scale"] = keys.number("logit_scale", 1.0)
    elif arch == "starcoder2":
        values["use_bias"] = "blk.0.attn_q.bias" in tensor_names
        values["sliding_window"] = window
    elif arch == "stablelm":
        if "blk.0.ffn_norm.weight" not in tensor_names:
            raise ModelError(f"{keys.file} has parallel blocks (StableLM 2 12B), which are not served as GGUF")
        values["use_qkv_bias"] = "blk.0.attn_q.bias" in tensor_names
    elif arch == "nemotron":
        values["attention_bias"] = "blk.0.attn_q.bias" in tensor_names
        values["mlp_bias"] = "blk.0.ffn_up.bias" in tensor_names
    elif arch == "glm4":
        values["attention_bias"] = "blk.0.attn_q.bias" in tensor_names
    elif arch == "qwen2moe":
        values["qkv_bias"] = "blk.0.attn_q.bias" in tensor_names
    elif arch == "gpt-oss":
        values["sliding_window"] = keys.size("attention.sliding_window")
        rope["truncate"] = False
    if arch == "granite":
        keys = keys.with_defaults(**{"attention.scale": head_dim**-0.5})  # as llama.cpp has it
        values |= {ours: keys.number(theirs, 1.0) for ours, theirs in _GRANITE_KEYS.items()}
    if arch == "gemma3":
        sliding = {"rope_theta": keys.number("rope.freq_base_swa", 10_000.0)}
        full = {**rope, "rope_theta": keys.number("rope.freq_base", 1_000_000.0)}
        values["rope_parameters"] = {FULL: full, SLIDING: sliding}
        pattern = keys.get("attention.sliding_window_pattern")
        if isinstance(pattern, list):
            values["layer_types"] = [SLIDING if slides else FULL for slides in pattern]
        elif pattern:
            values["sliding_window_pattern"] = pattern
    return values


def _experts(arch: str, keys: HFConfig) -> dict[str, Any]:
    """What config.json says of a mixture; whether weights are divided by their sum is known by the architecture."""
    num_used, size = keys.size("expert_used_count"), keys.size("feed_forward_length")
    values: dict[str, Any] = {"num_local_experts": keys.size("expert_count"), "num_experts_per_tok": num_used}
    match arch:
        case "llama":
            window = keys.integer("attention.sliding_window", 0) or None
            return {**values, "model_type": "mixtral", "sliding_window": window}
        case "olmoe":
            return {**values, "norm_topk_prob": False, "clip_qkv": keys.number("attention.clamp_kqv", 0.0) or None}
        case "gpt-oss":
            return {**values, "intermediate_size": keys.size("expert_feed_forward_length", size)}
        case "qwen2moe":
            return {
                **values,
                "norm_topk_prob": False,
                "moe_intermediate_size": keys.size("expert_feed_forward_length", size // num_used or None),
                "shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length", size),
            }
        case "qwen3moe":
            expert_size = keys.size("expert_feed_forward_length", size // num_used or None)
            return {**values, "norm_topk_prob": True, "moe_intermediate_size": expert_size}
    raise ModelError(
        f"{keys.file} holds a mixture of {keys['expert_count']} experts, which {arch} is not served with"
    )


def _rope(keys: HFConfig, head_dim: int, tensor_names: Collection[str], read: ReadTensor | None) -> dict[str, Any]:
    rotary_dim = keys.size("rope.dimension_count", head_dim)
    values: dict[str, Any] = {
        "rope_type": keys.text("rope.scaling.type", "none"),
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
        # The quarter keeps int(head_dim * factor) at rotary_dim, whatever the division rounds to.
        "partial_rotary_factor": 1.0 if rotary_dim == head_dim else (rotary_dim + 0.25) / head_dim,
    }
    scale = keys.number("rope.scaling.factor", keys.get("rope.scale_linear", 0.0))
    length = keys.size("rope.scaling.original_context_length", keys.size("context_length"))
    attention_factor = keys.number("rope.scaling.attn_factor", 1.0)
    factors = [name for name in ("rope_freqs", "rope_factors_long") if f"{name}.weight" in tensor_names]
    if values["rope_type"] == "none":
        values["rope_type"] = "linear" if scale not in (0.0, 1.0) else "default"
    if factors:
        if values["rope_type"] not in ("default", "longrope"):
            raise ModelError(f"{keys.file} scales rope both by {values['rope_type']} and by the tensor {factors[0]}")
        # Llama 3's factors divide the frequencies of every request: LongRoPE whose two variants are one.
        long = _factors(factors[0], read)
        is_longrope = factors == ["rope_factors_long"]
        values |= {
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": _factors("rope_factors_short", read) if is_longrope else long,
            "factor": 1.0,
            "attention_factor": attention_factor,
            "original_max_position_embeddings": length,
        }
    elif values["rope_type"] == "longrope":
        raise ModelError(f"{keys.file} asks for LongRoPE, but the file has no tensor rope_factors_long.weight")
    elif values["rope_type"] == "yarn":
        values |= {
            "original_max_position_embeddings": length,
            "beta_fast": keys.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": keys.get("rope.scaling.yarn_beta_slow"),
            # llama.cpp multiplies the stated factor by YaRN's own.
            "attention_factor": attention_factor * (1 + 0.1 * math.log(max(scale, 1.0))),
        }
    return {**values, "factor": scale} if values["rope_type"] in ("linear", "yarn") else values


def _factors(name: str, read: ReadTensor | None) -> list[float]:
    if read is None:
        raise ModelError(f"the rope scaling of this GGUF file is in the tensor {name}.weight, which was not given")
    tensor = read(f"{name}.weight")
    if tensor.dtype != "float32":
        raise ModelError(f"{name}.weight must be float32, got {tensor.dtype}")
    return [float(value) for value in tensor.data.reshape(-1)]


def _uniform(key: str, value: Any) -> Any:
    """One number for a list with a number for each layer, if they are equal."""
    if not key.endswith(("head_count", "head_count_kv", "feed_forward_length")) or not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise ModelError(f"{key} differs from layer to layer, which is not served: {value}")
    return value[0]
