"""The parameters of recurrences that stand in the place of attention."""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from .declaration import Declaration, filled
from .mixer import conv_channels
from .spec import MixerSpec


def declare_mixer(at: Declaration, mixer: MixerSpec, hidden_size: int) -> None:
    """Of a layer's mixer, in the order in which it reads them."""
    heads, size, keys = mixer.num_heads, mixer.num_heads * mixer.head_dim, mixer.num_key_heads * mixer.state_size
    if mixer.kind not in ("lightning", "wkv"):
        rows = {"q": keys, "k": keys, "v": size} if mixer.kind == "delta" else {}
        parts = at.parts({f"{name}_conv.weight": count for name, count in rows.items()})
        at.add("conv.weight", conv_channels(mixer), 1, mixer.conv_width, parts=parts)
        if mixer.conv_bias:
            at.add("conv.bias", conv_channels(mixer))
    match mixer.kind:
        case "delta":
            _delta(at, mixer, hidden_size)
        case "lightning":
            _lightning(at, mixer, hidden_size)
        case "mamba2":
            at.linear("in_proj", 2 * size + 2 * keys + heads, hidden_size, bias=mixer.bias)
            for name in ("a_log", "d", "dt_bias"):
                at.add(name, heads)
            if mixer.norm is not None:
                at.add("norm.weight", size)
        case "mamba":
            _mamba(at, mixer, hidden_size)
        case "lru":
            _lru(at, mixer, hidden_size)
        case "wkv":
            _blends(at, hidden_size, ("k", "v", "gate"))
            for name in ("k", "v", "gate"):
                at.linear(f"{name}_proj", heads, hidden_size)
            for name in ("a_log", "bonus"):
                at.add(name, heads)
        case "conv":
            at.linear("in_proj", 3 * size, hidden_size, bias=mixer.bias)
    if mixer.multipliers:
        counts = (size, size, keys, keys, heads)
        values = partial(np.repeat, np.asarray(mixer.multipliers, np.float32), counts)
        at.constant("multipliers", sum(counts), compute=values)
    at.linear("out_proj", hidden_size, size, bias=mixer.out_bias)


def declare_channel_mix(at: Declaration, mixer: MixerSpec, hidden_size: int) -> None:
    """Of the feed-forward block of RWKV-4."""
    size = mixer.mlp_size
    _blends(at, hidden_size, ("k", "gate"))
    at.linear("up_proj", size, hidden_size)
    at.linear("gate_proj", hidden_size, hidden_size)
    at.linear("down_proj", hidden_size, size)


def _mamba(at: Declaration, mixer: MixerSpec, hidden_size: int) -> None:
    heads, keys, rank = mixer.num_heads, mixer.num_key_heads * mixer.state_size, mixer.dt_rank
    at.linear("in_proj", 2 * heads, hidden_size, bias=mixer.bias)
    # Small, and what they make decides how long a state lasts.
    at.linear("x_proj", rank + 2 * keys, heads, quantizable=False)
    at.linear("dt_proj", heads, rank, quantizable=False)
    if mixer.norm is not None:
        for name, width in (("dt_norm", rank), ("b_norm", keys), ("c_norm", keys)):
            at.norm(mixer.norm, name, width)
    at.add("a_log", heads, keys)
    at.add("d", heads)
    at.add("dt_bias", heads)


def _delta(at: Declaration, mixer: MixerSpec, hidden_size: int) -> None:
    heads, size, keys = mixer.num_heads, mixer.num_heads * mixer.head_dim, mixer.num_key_heads * mixer.state_size
    groups, z = mixer.num_key_heads, {} if mixer.gate_rank else {"z_proj": size}
    larger = at.parts({"qkv_proj.weight": 2 * keys + size, **{f"{name}.weight": rows for name, rows in z.items()}})
    rows = {"q_proj": keys, "k_proj": keys, "v_proj": size, **z}
    at.fused("in_proj", rows, hidden_size, num_groups=groups, shard="replicated", larger_parts=larger)
    rows = {"beta_proj": heads, **({} if mixer.decay_rank else {"dt_proj": heads})}
    at.fused("gates_proj", rows, hidden_size, num_groups=groups)
    latents = (("decay", mixer.decay_rank, heads * mixer.state_size), ("gate", mixer.gate_rank, size))
    for name, rank, out in latents:
        if rank:
            at.linear(f"{name}_a_proj", rank, hidden_size)
            at.linear(f"{name}_b_proj", out, rank)
    if mixer.norm is not None:
        at.norm(mixer.norm, "norm", mixer.head_dim)
    at.add("a_log", heads)
    at.add("dt_bias", heads * (mixer.state_size if mixer.decay_rank else 1))


def _lightning(at: Declaration, mixer: MixerSpec, hidden_size: int) -> None:
    """A selective state space that forgets at fixed rates."""
    heads, size = mixer.num_heads, mixer.num_heads * mixer.head_dim
    rows = {f"{name}_proj": size for name in "qkv"}
    at.fused("in_proj", rows, hidden_size, num_groups=heads, shard="replicated")
    at.linear("gate_proj", size, hidden_size)
    rates = np.log(mixer.slope_scale) - np.arange(1, heads + 1) * (8 * math.log(2) / heads)
    at.constant("a_log", heads, compute=partial(np.asarray, rates, np.float32))
    for name in ("d", "dt_bias"):
        at.constant(name, heads, compute=partial(filled, (heads,), 0.0))
    at.add("norm.weight", size)


def _lru(at: Declaration, mixer: MixerSpec, hidden_size: int) -> None:
    size, num = mixer.num_heads, mixer.num_blocks
    at.fused(
        "in_proj", {"y_proj": size, "x_proj": size}, hidden_size, mixer.bias, num_groups=size, shard="replicated"
    )
    for name in ("input_gate", "decay_gate"):
        at.add(f"{name}.weight", size, size // num, kind="stacked", num_stacked=num)
    at.add("dt_bias", size, parts=at.parts({"rate": size}), combine=_log_rate)
    for name in ("a_log", "d"):
        at.constant(name, size, compute=partial(filled, (size,), 0.0))
    for name in ("input_gate", "decay_gate"):
        at.add(f"{name}.bias", size)


def _log_rate(rate: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Logarithms of the fastest decays of a real-gated linear recurrent unit, 8 * softplus(rate)."""
    return np.asarray(np.log(8 * np.logaddexp(0, rate)), np.float32)


def _blends(at: Declaration, hidden_size: int, names: Sequence[str]) -> None:
    """Of a block that blends each token with the one before."""
    at.constant("conv.weight", hidden_size, 1, 2, compute=partial(_shift_by_one, hidden_size))
    for name in names:
        at.add(f"{name}_mix", hidden_size)


def _shift_by_one(size: int) -> npt.NDArray[np.float32]:
    """A convolution that gives what the token before had."""
    weight = np.zeros((size, 1, 2), np.float32)
    weight[..., 0] = 1
    return weight
