"""GGUF metadata as the config.json that transformers would have."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from ..errors import ModelError
from ..suggest import did_you_mean
from .config import HFConfig
from .gguf_archs import ARCHS, FLAGS, KEYS
from .gguf_file import GGUFFile, ReadTensor, read_rope
from .llama_like import FULL, SLIDING
from .spec import ModelSpec, PoolerSpec, Pooling

_DTYPES = {1: "float16", 32: "bfloat16"}
"""general.file_type of unquantized files; all others compute in float32."""
_MIXERS = ("ssm_conv1d", "ssm_conv1d_q", "shortconv.conv")
"""Tensors of recurrent layers."""

_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_POOLING: Mapping[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}


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
        "type_vocab_size": metadata.get("tokenizer.ggml.token_type_count", 2) * ("token_types.weight" in file.names),
        "dtype": _DTYPES.get(metadata.get("general.file_type", 0), "float32"),
        **_positions(file),
        **_layers(file),
        **_recurrences(file),
        **arch.values,
    }
    for leaves, ours in FLAGS.items():
        values |= dict.fromkeys(ours.split(), file.has(*leaves.split()))
    for theirs, ours in (*KEYS.items(), *arch.keys.items()):
        if (value := keys.get(theirs)) is not None:
            values |= dict.fromkeys(ours.split(), value)
    values |= arch.special(file, values)
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


def _positions(file: GGUFFile) -> dict[str, Any]:
    """Sizes of heads, rope, and which layers slide."""
    keys, num_heads = file.keys, file.keys.integer("attention.head_count", 0)
    if not num_heads:
        return {}
    if (hidden_size := keys.size("embedding_length")) < num_heads and "attention.key_length" not in keys:
        raise ModelError(
            f"{keys.file} has {num_heads} heads (attention.head_count) for embedding_length {hidden_size}"
        )
    head_dim = keys.size("attention.key_length", hidden_size // num_heads)
    values: dict[str, Any] = {"head_dim": head_dim, "num_key_value_heads": num_heads}
    values["attention_multiplier"] = head_dim**-0.5
    if "attention.kv_lora_rank" in keys:
        rope_dim, whole = keys.size("rope.dimension_count"), keys.size("attention.key_length_mla", head_dim)
        value_length = keys.get("attention.value_length_mla", keys.get("attention.value_length"))
        values |= {"head_dim": None, "q_lora_rank": None, "qk_rope_head_dim": rope_dim}
        values["qk_nope_head_dim"] = whole - rope_dim
        values |= {} if value_length is None else {"v_head_dim": value_length}
        head_dim = rope_dim
    elif keys.size("attention.value_length", head_dim) != head_dim and file.arch != "mimo2":
        raise ModelError(f"keys and values of {keys.file} differ in size, which {file.arch} does not serve")
    values["rope_parameters"] = read_rope(file, head_dim)
    window, pattern = keys.integer("attention.sliding_window", 0), keys.get("attention.sliding_window_pattern")
    values["sliding_window"] = window or None
    if window and isinstance(pattern, list):
        values["layer_types"] = [SLIDING if slides else FULL for slides in pattern]
    elif window and pattern:
        values["sliding_window_pattern"] = pattern
    return values


def _layers(file: GGUFFile) -> dict[str, Any]:
    """Which layers are recurrent and which have experts, and how many there are without those that predict more."""
    num_layers = file.keys.num_layers("block_count") - file.keys.integer("nextn_predict_layers", 0)
    layers = range(num_layers)
    values: dict[str, Any] = dict.fromkeys(_NUM_LAYERS, num_layers)
    if "ffn_gate_inp.weight" in file.leaves:
        is_sparse = [f"blk.{i}.ffn_gate_inp.weight" in file.names for i in layers]
        values["mlp_layer_types"] = ["sparse" if flag else "dense" for flag in is_sparse]
    has_mixer = [not file.names.isdisjoint(f"blk.{i}.{leaf}.weight" for leaf in _MIXERS) for i in layers]
    if any(has_mixer):
        values["layer_types"] = ["linear_attention" if flag else "full_attention" for flag in has_mixer]
        values["layers_block_type"] = values["layer_types"]
    return values


def _recurrences(file: GGUFFile) -> dict[str, Any]:
    """Sizes of state spaces. The rank of Mamba's step sizes is the number of heads of those that have any."""
    if "ssm.inner_size" not in file.keys:
        return {}
    size, rank = file.keys.size("ssm.inner_size"), file.keys.size("ssm.time_step_rank")
    ranks = "mamba_dt_rank time_step_rank mamba_n_heads mamba_num_heads linear_num_value_heads"
    head_dims = "mamba_d_head mamba_head_dim linear_value_head_dim"
    return {
        **dict.fromkeys(ranks.split(), rank),
        **dict.fromkeys(head_dims.split(), size // rank),
        "mamba_expand": size / file.keys.size("embedding_length"),
        "mamba_d_ssm": size,
    }


def with_gguf_pooler(spec: ModelSpec, metadata: Mapping[str, Any]) -> ModelSpec:
    """The spec with embeddings as a file asks for them, of length 1 as llama.cpp gives them. Raises ModelError."""
    pooling = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0)
    if not pooling:
        return spec
    if pooling not in _POOLING:
        raise ModelError(f"this GGUF file is a classifier (pooling_type {pooling}), which is served from safetensors")
    return dataclasses.replace(spec, pooler=PoolerSpec(kind=_POOLING[pooling], normalize=True))


def _open(metadata: Mapping[str, Any], names: Collection[str], read: ReadTensor | None) -> GGUFFile:
    """What a file says. Raises ModelError for an architecture that is not served, or layers that differ in size."""
    arch = str(metadata.get("general.architecture"))
    if arch not in ARCHS:
        raise ModelError(
            f"GGUF architecture {arch!r} is not served{did_you_mean(arch, ARCHS)}",
            remedies=[f"take a model of one of these: {', '.join(ARCHS)}"],
        )
    prefix = f"{arch}."
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(value := values.get(key), list) and key not in ARCHS[arch].by_layer:
            values[key] = _uniform(f"{prefix}{key}", value) or None
    leaves = frozenset(name.split(".", 2)[2] for name in names if name.startswith("blk."))
    keys = HFConfig(values, file=f"the GGUF metadata of {arch}")
    return GGUFFile(arch, keys, metadata, frozenset(names), leaves, read)


def _uniform(key: str, values: list[int]) -> int:
    """One number for a list with a number for each layer, if they are equal where a layer has any."""
    stated = sorted({value for value in values if value})
    if len(stated) > 1:
        raise ModelError(f"{key} differs from layer to layer, which is not served: {values}")
    return stated[0] if stated else 0
