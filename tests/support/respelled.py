"""Families that transformers lacks: a twin that computes the same, rewritten as they publish their checkpoints."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Respell = Callable[[Path], None]


def _rewrite(
    folder: Path, names: Mapping[str, str], drop: tuple[str, ...], config: Mapping[str, Any], more: Tensors
) -> None:
    """names: (part of a twin's name -> of ours), tried in order; drop: parts of names that `more` replaces."""
    tensors = dict(more)
    for name, tensor in load_file(folder / "model.safetensors").items():
        if any(part in name for part in drop):
            continue
        for old, new in names.items():
            name = name.replace(old, new)
        tensors[name] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def _read(folder: Path) -> tuple[dict[str, Any], Tensors]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def _fused(tensors: Tensors, layer: int, leaf: str = "weight") -> list[torch.Tensor]:
    return [tensors[f"model.layers.{layer}.self_attn.{part}_proj.{leaf}"] for part in "qkv"]


def internlm2(folder: Path) -> None:
    """From Llama: q, k and v of each KV head stand together."""
    config, tensors = _read(folder)
    groups, more = config["num_key_value_heads"], Tensors()
    for i in range(config["num_hidden_layers"]):
        parts = [part.reshape(groups, -1, part.shape[-1]) for part in _fused(tensors, i)]
        more[f"model.layers.{i}.attention.wqkv.weight"] = torch.cat(parts, 1).flatten(0, 1).contiguous()
    names = {
        "embed_tokens": "tok_embeddings", "lm_head": "output", "self_attn.o_proj": "attention.wo",
        "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "mlp.": "feed_forward.",
        "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    keys = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "hidden_act", "rms_norm_eps", "tie_word_embeddings",
    )  # fmt: skip
    ours = {key: config[key] for key in keys}
    ours |= {"model_type": "internlm2", "bias": False, "rope_theta": 10000.0}
    ours["rope_scaling"] = {"type": "dynamic", "factor": 4.0}
    _rewrite(folder, names, ("q_proj", "k_proj", "v_proj"), ours, more)


def baichuan(folder: Path) -> None:
    """From Llama of hidden size 4096, the one that has rope."""
    config, tensors = _read(folder)
    more = {
        f"model.layers.{i}.self_attn.W_pack.weight": torch.cat(_fused(tensors, i))
        for i in range(config["num_hidden_layers"])
    }
    keys = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
        "rms_norm_eps", "tie_word_embeddings",
    )  # fmt: skip
    ours = {key: config[key] for key in keys} | {"model_type": "baichuan", "model_max_length": 64}
    _rewrite(folder, {}, ("q_proj", "k_proj", "v_proj"), ours, more)


def chatglm(folder: Path) -> None:
    """From GLM, which later took the same model up."""
    config, tensors = _read(folder)
    more: Tensors = {}
    for i in range(config["num_hidden_layers"]):
        for leaf in ("weight", "bias"):
            name = f"transformer.encoder.layers.{i}.self_attention.query_key_value.{leaf}"
            more[name] = torch.cat(_fused(tensors, i, leaf))
    names = {
        "model.embed_tokens": "transformer.embedding.word_embeddings", "lm_head": "transformer.output_layer",
        "model.norm": "transformer.encoder.final_layernorm", "model.layers": "transformer.encoder.layers",
        "self_attn.o_proj": "self_attention.dense", "gate_up_proj": "dense_h_to_4h", "down_proj": "dense_4h_to_h",
    }  # fmt: skip
    ours = {
        "model_type": "chatglm", "num_layers": config["num_hidden_layers"], "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"], "kv_channels": config["head_dim"],
        "num_attention_heads": config["num_attention_heads"], "multi_query_attention": True,
        "multi_query_group_num": config["num_key_value_heads"], "add_bias_linear": False, "add_qkv_bias": True,
        "padded_vocab_size": config["vocab_size"], "seq_length": 64, "rmsnorm": True, "rope_ratio": 50,
        "layernorm_epsilon": config["rms_norm_eps"], "post_layer_norm": True, "tie_word_embeddings": False,
        "apply_residual_connection_post_layernorm": False,
    }  # fmt: skip
    _rewrite(folder, names, ("q_proj", "k_proj", "v_proj"), ours, more)
