"""A GGUF file's metadata and names of tensors as families' configs are read from them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ModelError
from ..weights.source import HostTensor
from .config import HFConfig

ReadTensor = Callable[[str], HostTensor]


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """What a file says. keys: its metadata without the architecture's prefix; metadata: all of it. leaves: names of
    tensors without their layer."""

    arch: str
    keys: HFConfig
    metadata: Mapping[str, Any]
    names: frozenset[str]
    leaves: frozenset[str]
    read: ReadTensor | None

    def has(self, *leaves: str) -> bool:
        """True if any layer has one of these tensors."""
        return not self.leaves.isdisjoint(leaves)

    def rows(self, name: str) -> int:
        """Rows of a tensor."""
        assert self.read is not None
        return self.read(name).shape[0]


def read_rope(file: GGUFFile, head_dim: int) -> dict[str, Any]:
    """Rotary parameters as config.json has them. Raises ModelError for two kinds of scaling at once."""
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
        long = read_factors(factors[0], file.read)
        is_longrope = factors == ["rope_factors_long"]
        values |= {
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": read_factors("rope_factors_short", file.read) if is_longrope else long,
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


def read_factors(name: str, read: ReadTensor | None) -> list[float]:
    """The numbers of a tensor. Raises ModelError."""
    if read is None:
        raise ModelError(f"the rope scaling of this GGUF file is in the tensor {name}.weight, which was not given")
    tensor = read(f"{name}.weight")
    if tensor.dtype != "float32":
        raise ModelError(f"{name}.weight must be float32, got {tensor.dtype}")
    return [float(value) for value in tensor.data.reshape(-1)]
