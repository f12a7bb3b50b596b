"""The parameters of recurrences that stand in the place of attention."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from . import leaves
from .mixer import conv_channels
from .params import Param, Part
from .spec import MixerSpec


def mixer_params(mixer: MixerSpec, prefix: str, hidden_size: int) -> Iterator[Param]:
    """Of a layer's mixer, in the order in which it reads them."""
    heads, size, keys = mixer.num_heads, mixer.num_heads * mixer.head_dim, mixer.num_key_heads * mixer.state_size
    channels = conv_channels(mixer)
    vectors: dict[str, tuple[int, ...]] = {}
    if mixer.kind not in ("lightning", "wkv"):
        rows = {"q": keys, "k": keys, "v": size} if mixer.kind == "delta" else {}
        parts = tuple(Part(name=f"{prefix}.{name}_conv.weight", rows=count) for name, count in rows.items())
        yield Param(name=f"{prefix}.conv.weight", shape=(channels, 1, mixer.conv_width), kind="vector", parts=parts)
        vectors |= {"conv.bias": (channels,)} if mixer.conv_bias else {}
    match mixer.kind:
        case "delta":
            yield from _delta(mixer, prefix, hidden_size)
            vectors |= {"a_log": (heads,), "dt_bias": (heads * (mixer.state_size if mixer.decay_rank else 1),)}
        case "lightning":
            rows = {f"{name}_proj": size for name in "qkv"}
            [fused] = leaves.fused(f"{prefix}.in_proj", prefix, rows, hidden_size, False, heads)
            yield dataclasses.replace(fused, shard="replicated")
            yield from leaves.linear(f"{prefix}.gate_proj", size, hidden_size, "replicated", False)
            yield from _lightning_constants(mixer, prefix)
            vectors |= {"norm.weight": (size,)}
        case "mamba2":
            yield from leaves.linear(
                f"{prefix}.in_proj", 2 * size + 2 * keys + heads, hidden_size, "replicated", mixer.bias
            )
            vectors |= {"a_log": (heads,), "d": (heads,), "dt_bias": (heads,)}
            if mixer.norm is not None:
                vectors["norm.weight"] = (size,)
        case "mamba":
            yield from leaves.linear(f"{prefix}.in_proj", 2 * size, hidden_size, "replicated", mixer.bias)
            # Small, and what they make decides how long a state lasts.
            size_out = mixer.dt_rank + 2 * keys
            yield from leaves.linear(f"{prefix}.x_proj", size_out, size, "replicated", False, quantizable=False)
            yield from leaves.linear(f"{prefix}.dt_proj", size, mixer.dt_rank, "replicated", False, quantizable=False)
            vectors |= {"a_log": (heads, keys), "d": (heads,), "dt_bias": (heads,)}
            if mixer.norm is not None:
                for name, width in (("dt_norm", mixer.dt_rank), ("b_norm", keys), ("c_norm", keys)):
                    yield from leaves.norm(mixer.norm, f"{prefix}.{name}", width)
        case "lru":
            rows = {"y_proj": size, "x_proj": size}
            for param in leaves.fused(f"{prefix}.in_proj", prefix, rows, hidden_size, mixer.bias, heads):
                yield dataclasses.replace(param, shard="replicated")
            for name in ("input_gate", "decay_gate"):
                yield Param(
                    name=f"{prefix}.{name}.weight",
                    shape=(size, size // mixer.num_blocks),
                    kind="stacked",
                    num_stacked=mixer.num_blocks,
                )
            parts = (Part(name=f"{prefix}.rate", rows=size),)
            yield Param(name=f"{prefix}.dt_bias", shape=(size,), kind="vector", parts=parts, combine=_log_rate)
            for name in ("a_log", "d"):
                zeros = partial(leaves.filled, (size,), 0.0)
                yield Param(name=f"{prefix}.{name}", shape=(size,), kind="constant", compute=zeros)
            vectors |= {"input_gate.bias": (size,), "decay_gate.bias": (size,)}
        case "wkv":
            yield from _time_mix_params(mixer, prefix, hidden_size)
        case "conv":
            yield from leaves.linear(f"{prefix}.in_proj", 3 * size, hidden_size, "replicated", mixer.bias)
    for name, shape in vectors.items():
        yield Param(name=f"{prefix}.{name}", shape=shape, kind="vector")
    if mixer.multipliers:
        counts = (size, size, keys, keys, heads)
        yield Param(
            name=f"{prefix}.multipliers",
            shape=(sum(counts),),
            kind="constant",
            compute=lambda: np.repeat(np.asarray(mixer.multipliers, np.float32), counts),
        )
    yield from leaves.linear(f"{prefix}.out_proj", hidden_size, size, "replicated", mixer.out_bias)


def channel_mix_params(mixer: MixerSpec, prefix: str, hidden_size: int) -> Iterator[Param]:
    """Of the feed-forward block."""
    size = mixer.mlp_size
    yield from _mixes(prefix, hidden_size, ("k", "gate"))
    for name, rows, columns in (
        ("up_proj", size, hidden_size),
        ("gate_proj", hidden_size, hidden_size),
        ("down_proj", hidden_size, size),
    ):
        yield from leaves.linear(f"{prefix}.{name}", rows, columns, "replicated", False)


def _delta(mixer: MixerSpec, prefix: str, hidden_size: int) -> Iterator[Param]:
    heads, size, keys = mixer.num_heads, mixer.num_heads * mixer.head_dim, mixer.num_key_heads * mixer.state_size
    rows = {"q_proj": keys, "k_proj": keys, "v_proj": size, **({} if mixer.gate_rank else {"z_proj": size})}
    [fused] = leaves.fused(f"{prefix}.in_proj", prefix, rows, hidden_size, False, mixer.num_key_heads)
    larger = (Part(name=f"{prefix}.qkv_proj.weight", rows=2 * keys + size), *fused.parts[3:])
    yield dataclasses.replace(fused, larger_parts=larger, shard="replicated")
    rows = {"beta_proj": heads, **({} if mixer.decay_rank else {"dt_proj": heads})}
    yield from leaves.fused(f"{prefix}.gates_proj", prefix, rows, hidden_size, False, mixer.num_key_heads)
    for name, rank, out in (
        ("decay", mixer.decay_rank, heads * mixer.state_size),
        ("gate", mixer.gate_rank, size),
    ):
        if rank:
            yield from leaves.linear(f"{prefix}.{name}_a_proj", rank, hidden_size, "replicated", False)
            yield from leaves.linear(f"{prefix}.{name}_b_proj", out, rank, "replicated", False)
    if mixer.norm is not None:
        yield from leaves.norm(mixer.norm, f"{prefix}.norm", mixer.head_dim)


def _lightning_constants(mixer: MixerSpec, prefix: str) -> Iterator[Param]:
    """What makes a selective state space forget at fixed rates."""
    heads = mixer.num_heads
    values = {
        "a_log": np.log(mixer.slope_scale) - np.arange(1, heads + 1) * (8 * math.log(2) / heads),
        "d": np.zeros(heads),
        "dt_bias": np.zeros(heads),
    }
    for name, numbers in values.items():
        yield Param(
            name=f"{prefix}.{name}",
            shape=(heads,),
            kind="constant",
            compute=partial(np.asarray, numbers, np.float32),
        )


def _log_rate(rate: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Logarithms of the fastest decays of a real-gated linear recurrent unit, 8 * softplus(rate)."""
    return np.asarray(np.log(8 * np.logaddexp(0, rate)), np.float32)


def _time_mix_params(mixer: MixerSpec, prefix: str, hidden_size: int) -> Iterator[Param]:
    """Of the block in the place of attention, but for out_proj."""
    yield from _mixes(prefix, hidden_size, ("k", "v", "gate"))
    for name in ("k", "v", "gate"):
        yield from leaves.linear(f"{prefix}.{name}_proj", mixer.num_heads, hidden_size, "replicated", False)
    for name in ("a_log", "bonus"):
        yield Param(name=f"{prefix}.{name}", shape=(mixer.num_heads,), kind="vector")


def _mixes(prefix: str, hidden_size: int, names: Sequence[str]) -> Iterator[Param]:
    shift = partial(_shift_by_one, hidden_size)
    yield Param(name=f"{prefix}.conv.weight", shape=(hidden_size, 1, 2), kind="constant", compute=shift)
    for name in names:
        yield Param(name=f"{prefix}.{name}_mix", shape=(hidden_size,), kind="vector")


def _shift_by_one(size: int) -> npt.NDArray[np.float32]:
    """A convolution that gives what the token before had."""
    weight = np.zeros((size, 1, 2), np.float32)
    weight[..., 0] = 1
    return weight
