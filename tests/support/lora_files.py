"""Adapters as PEFT saves them, and models with these merged into their weights: the oracle."""

import copy
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_lora(
    folder: Path, model: PreTrainedModel, targets: Sequence[str], *, seed: int, rank: int = 4, **config: Any
) -> PreTrainedModel:
    """Save a random adapter of the modules that end in `targets`; returns the model with it merged. config: keys of
    adapter_config.json."""
    settings: dict[str, Any] = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 6, "target_modules": list(targets), "bias": "none", **config
    }  # fmt: skip
    generator, tensors, merged = torch.Generator().manual_seed(seed), dict[str, torch.Tensor](), copy.deepcopy(model)
    for name, module in merged.named_modules():
        if not name.endswith(tuple(f".{target}" for target in targets)):
            continue
        weight: Any = module.weight
        is_turned = type(module).__name__ == "Conv1D"
        rows, columns = weight.shape[::-1] if is_turned else weight.shape
        own_rank = by_suffix(settings.get("rank_pattern", {}), name, rank)
        a = torch.randn(own_rank, columns, generator=generator) / columns**0.5
        b = torch.randn(rows, own_rank, generator=generator) / 2
        alpha = by_suffix(settings.get("alpha_pattern", {}), name, settings["lora_alpha"])
        scale = alpha / (math.sqrt(own_rank) if settings.get("use_rslora") else own_rank)
        change = scale * (b.double() @ a.double()).float()
        weight.data += change.T if is_turned else change
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    assert tensors, targets
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return merged


def by_suffix(pattern: Mapping[str, Any], name: str, default: Any) -> Any:
    """What a pattern without regular expressions says of a module."""
    return next((value for key, value in pattern.items() if name == key or name.endswith(f".{key}")), default)


def linear_modules(model: PreTrainedModel) -> list[str]:
    """Last names of all linear layers within the model's layers."""
    kinds = ("Linear", "Conv1D")
    names = [name for name, module in model.named_modules() if type(module).__name__ in kinds]
    return sorted({name.rpartition(".")[2] for name in names if any(part.isdigit() for part in name.split("."))})
