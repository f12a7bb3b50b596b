"""Recurrences in the place of attention inside a forward function, and the states that they keep."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..stages import Array, ForwardBatch
from .constants import filled, lightning_rates, log_rate, shift_by_one
from .memory import Sight
from .scope import Scope
from .spec import Activation, MixerSpec, NormSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """One array of a state: its shape, and whether it is float32 whatever the model's dtype is."""

    shape: tuple[int, ...]
    is_float32: bool


def state_shapes(mixer: MixerSpec) -> tuple[StateShape, ...]:
    """The arrays of one state, in the order in which `mix` takes them: inputs of the convolution, recurrence; wkv:
    the token before of both blocks, with sums in between."""
    conv = StateShape(shape=(mixer.conv_width - 1, conv_channels(mixer)), is_float32=False)
    sizes = (mixer.head_dim, mixer.state_size) if mixer.kind != "delta" else (mixer.state_size, mixer.head_dim)
    recurrence = StateShape(shape=(mixer.num_heads, *sizes), is_float32=True)
    match mixer.kind:
        case "wkv":
            shift = StateShape(shape=(1, mixer.shift_size), is_float32=False)
            return shift, StateShape(shape=(3, mixer.num_heads), is_float32=True), shift
        case "conv":
            return (conv,)
        case "lightning":
            return (recurrence,)
    return conv, recurrence


def conv_channels(mixer: MixerSpec) -> int:
    """Channels that pass the short convolution."""
    values, keys = mixer.num_heads * mixer.head_dim, mixer.num_key_heads * mixer.state_size
    return values + 2 * keys if mixer.kind in ("mamba2", "delta") else values


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """A layer's mixer during a pass. states: as the pass has left them so far; rows: by which states are read and
    kept (query_start_loc, from_slots, to_slots)."""

    at: Scope
    mixer: MixerSpec
    batch: ForwardBatch
    states: list[Array]
    rows: tuple[Array, Array, Array]

    def convolve(self, x: Array, parts: Mapping[str, int] | None = None) -> Array:
        """The short convolution over time, with the activation behind it: [num_tokens, channels]. parts: channels
        of the convolutions that a checkpoint may have instead."""
        at, mixer, channels = self.at, self.mixer, conv_channels(self.mixer)
        activation: Activation | None = None if mixer.kind in ("conv", "lru") else mixer.activation
        weight = at.param("conv.weight", channels, 1, mixer.conv_width, parts=parts)
        bias = at.param("conv.bias", channels) if mixer.conv_bias else None
        x, self.states[0] = at.ops.causal_conv(x, weight, bias, self.states[0], *self.rows, activation=activation)
        return x

    def scan(self, x: Array, dt: Array, b: Array, c: Array, vectors: tuple[Array, Array, Array]) -> Array:
        """The selective state space over rows of joined heads: [num_tokens, num_heads * head_dim]. vectors: a_log,
        d and dt_bias."""
        ops, mixer = self.at.ops, self.mixer
        y, self.states[-1] = ops.selective_scan(
            ops.split_heads(x, head_dim=mixer.head_dim),
            dt,
            ops.split_heads(b, head_dim=mixer.state_size),
            ops.split_heads(c, head_dim=mixer.state_size),
            *vectors,
            self.states[-1],
            *self.rows,
            dt_min=mixer.dt_limit[0],
            dt_max=mixer.dt_limit[1],
            max_query_len=self.batch.max_query_len,
        )
        return ops.merge_heads(y)


def mix(at: Scope, mixer: MixerSpec, x: Array, sight: Sight) -> Array:
    """The mixer's output for x: [num_tokens, hidden_size], of that shape."""
    r, x, size = _open(at, mixer, sight), at.scaled(x, mixer.in_scale), mixer.num_heads * mixer.head_dim
    match mixer.kind:
        case "wkv":
            out = _time_mix(r, x)
        case "mamba":
            out = _mamba(r, x)
        case "mamba2":
            out = _mamba2(r, x)
        case "delta":
            out = _delta(r, x)
        case "lightning":
            out = _lightning(r, x)
        case "conv":
            out = _conv(r, x)
        case "lru":
            out = _lru(r, x)
    sight.caches.states[sight.layer_idx] = tuple(r.states)
    return at.scaled(at.linear("out_proj", out, at.hidden_size, size, bias=mixer.out_bias), mixer.out_scale)


def mix_channels(at: Scope, mixer: MixerSpec, x: Array, sight: Sight) -> Array:
    """The feed-forward block of a layer that keeps a state of it: as `mix`."""
    r = _open(at, mixer, sight)
    out = _channel_mix(r, x)
    sight.caches.states[sight.layer_idx] = tuple(r.states)
    return out


def _open(at: Scope, mixer: MixerSpec, sight: Sight) -> Recurrence:
    caches = sight.caches
    batch, group = caches.batch, caches.kv.state_group
    rows = (batch.query_start_loc, batch.block_tables[group], batch.slot_mappings[group])
    return Recurrence(at=at, mixer=mixer, batch=batch, states=[*caches.states[sight.layer_idx]], rows=rows)


def _mamba(r: Recurrence, x: Array) -> Array:
    """[num_tokens, hidden_size] -> [num_tokens, num_heads * head_dim], as all of these."""
    at, mixer, ops = r.at, r.mixer, r.at.ops
    size, keys, rank, groups = mixer.num_heads, mixer.state_size, mixer.dt_rank, mixer.num_key_heads
    rows = {"in_x_proj": size, "in_z_proj": size}
    both = at.fused("in_proj", x, rows, at.hidden_size, mixer.bias, num_groups=size, shard="replicated")
    x, z = ops.split(both, (size, size))
    x = r.convolve(x)
    parts = ops.split(_by_group(r, "x_proj", x, rank + 2 * keys, size // groups), (rank, keys, keys))
    dt, b, c = parts if groups == 1 else [ops.merge_heads(part) for part in parts]
    if mixer.norm is not None:
        dt = at.normalize(mixer.norm, "dt_norm", dt, rank)
        b = at.normalize(mixer.norm, "b_norm", b, keys)
        c = at.normalize(mixer.norm, "c_norm", c, keys)
    dt = _by_group(r, "dt_proj", dt, size // groups, rank)
    dt = dt if groups == 1 else ops.merge_heads(dt)
    y = r.scan(x, dt, b, c, (at.param("a_log", size, keys), at.param("d", size), at.param("dt_bias", size)))
    return ops.act_mul(ops.concat((z, y)), activation="silu")


def _by_group(r: Recurrence, name: str, x: Array, out_features: int, in_features: int) -> Array:
    """What each group of channels makes of its own values by a matrix of its own, [num_tokens, num_groups,
    out_features]; of one group [num_tokens, out_features]. These are small, and what they make decides how long a
    state lasts."""
    num, at = r.mixer.num_key_heads, r.at
    if num == 1:
        return at.linear(name, x, out_features, in_features, quantizable=False)
    weight = at.param(f"{name}.weight", num * out_features, in_features, kind="stacked", num_stacked=num)
    return at.ops.expand_values(at.ops.split_heads(x, head_dim=in_features), weight, v_head_dim=out_features)


def _mamba2(r: Recurrence, x: Array) -> Array:
    at, mixer, ops, heads = r.at, r.mixer, r.at.ops, r.mixer.num_heads
    size, keys = heads * mixer.head_dim, mixer.num_key_heads * mixer.state_size
    parts = (size, size, keys, keys, heads)  # gate, values, b, c and a step size for each head
    x = at.linear("in_proj", x, sum(parts), at.hidden_size, bias=mixer.bias)
    if mixer.multipliers:
        values = partial(np.repeat, np.asarray(mixer.multipliers, np.float32), parts)
        x = ops.mul(x, at.constant("multipliers", sum(parts), compute=values))
    z, x, dt = ops.split(x, (size, size + 2 * keys, heads))
    x, b, c = ops.split(r.convolve(x), (size, keys, keys))
    y = r.scan(x, dt, b, c, (at.param("a_log", heads), at.param("d", heads), at.param("dt_bias", heads)))
    if mixer.norm is not None and mixer.norm_first:
        y = _norm_groups(r, mixer.norm, y)
    y = ops.act_mul(ops.concat((z, y)), activation="silu")
    return y if mixer.norm is None or mixer.norm_first else _norm_groups(r, mixer.norm, y)


def _delta(r: Recurrence, x: Array) -> Array:
    at, mixer, ops, hidden, heads = r.at, r.mixer, r.at.ops, r.at.hidden_size, r.mixer.num_heads
    size, groups, num_steps = heads * mixer.head_dim, mixer.num_key_heads, heads
    keys = groups * mixer.state_size
    own_z = {} if mixer.gate_rank else {"z_proj": size}
    rows, larger = {"q_proj": keys, "k_proj": keys, "v_proj": size} | own_z, {"qkv_proj": 2 * keys + size} | own_z
    qkv = at.fused("in_proj", x, rows, hidden, num_groups=groups, shard="replicated", larger=larger)
    rows = {"beta_proj": heads} if mixer.decay_rank else {"beta_proj": heads, "dt_proj": heads}
    beta = at.fused("gates_proj", x, rows, hidden, num_groups=groups)
    if rank := mixer.decay_rank:
        num_steps = heads * mixer.state_size
        decay = at.linear("decay_b_proj", at.linear("decay_a_proj", x, rank, hidden), num_steps, rank)
        dt = ops.split_heads(decay, head_dim=mixer.state_size)
    else:
        beta, dt = ops.split(beta, (heads, heads))
    if rank := mixer.gate_rank:
        z = at.linear("gate_b_proj", at.linear("gate_a_proj", x, rank, hidden), size, rank)
    else:
        qkv, z = ops.split(qkv, (2 * keys + size, size))
    qkv = r.convolve(qkv, {"q_conv.weight": keys, "k_conv.weight": keys, "v_conv.weight": size})
    query, key, value = ops.split(qkv, (keys, keys, size))
    y, r.states[-1] = ops.gated_delta(
        ops.split_heads(query, head_dim=mixer.state_size),
        ops.split_heads(key, head_dim=mixer.state_size),
        ops.split_heads(value, head_dim=mixer.head_dim),
        dt,
        beta,
        at.param("a_log", heads),
        at.param("dt_bias", num_steps),
        r.states[-1],
        *r.rows,
        beta_scale=mixer.beta_scale,
        max_query_len=r.batch.max_query_len,
    )
    y = ops.merge_heads(y if mixer.norm is None else at.normalize(mixer.norm, "norm", y, mixer.head_dim))
    return (
        ops.gate(y, z) if mixer.gate_activation == "sigmoid" else ops.act_mul(ops.concat((z, y)), activation="silu")
    )


def _lightning(r: Recurrence, x: Array) -> Array:
    """A selective state space with steps of 1, which forgets at fixed rates."""
    at, mixer, ops, heads, hidden = r.at, r.mixer, r.at.ops, r.mixer.num_heads, r.at.hidden_size
    size = heads * mixer.head_dim
    rows = {f"{name}_proj": size for name in "qkv"}
    qkv = at.fused("in_proj", x, rows, hidden, num_groups=heads, shard="replicated")
    query, key, value = ops.split(ops.act(qkv, activation=mixer.activation), (size, size, size))
    dt, _ = ops.split(qkv, (heads, 3 * size - heads))  # cut to 1, whatever it is
    a_log = at.constant("a_log", heads, compute=partial(lightning_rates, mixer))
    d, dt_bias = (at.constant(name, heads, compute=partial(filled, (heads,), 0.0)) for name in ("d", "dt_bias"))
    y = r.scan(value, dt, key, query, (a_log, d, dt_bias))
    y = y if mixer.norm is None else at.normalize(mixer.norm, "norm", y, size)
    return ops.gate(y, at.linear("gate_proj", x, size, hidden))


def _conv(r: Recurrence, x: Array) -> Array:
    """Gates stand before and behind the convolution."""
    at, ops, size = r.at, r.at.ops, r.mixer.num_heads
    b, c, x = ops.split(at.linear("in_proj", x, 3 * size, at.hidden_size, bias=r.mixer.bias), (size,) * 3)
    return ops.mul(c, r.convolve(ops.mul(b, x)))


def _lru(r: Recurrence, x: Array) -> Array:
    """A selective state space of one number for each channel, which is written and read as it is."""
    at, mixer, ops, size, num = r.at, r.mixer, r.at.ops, r.mixer.num_heads, r.mixer.num_blocks
    rows = {"y_proj": size, "x_proj": size}
    both = at.fused("in_proj", x, rows, at.hidden_size, mixer.bias, num_groups=size, shard="replicated")
    y, x = ops.split(both, (size, size))
    x = r.convolve(x)
    blocks, names = ops.split_heads(x, head_dim=size // num), ("input_gate", "decay_gate")
    weights = [at.param(f"{name}.weight", size, size // num, kind="stacked", num_stacked=num) for name in names]
    enters, decays = (ops.merge_heads(ops.absorb_keys(blocks, weight)) for weight in weights)
    enter_bias, decay_bias = (at.param(f"{name}.bias", size) for name in names)
    rate = at.param("dt_bias", size, parts={"rate": size}, combine=log_rate)
    taken, dt, one = ops.lru_inputs(x, enters, decays, enter_bias, decay_bias, rate, r.batch.positions)
    a_log, d = (at.constant(name, size, compute=partial(filled, (size,), 0.0)) for name in ("a_log", "d"))
    h = r.scan(taken, dt, one, one, (a_log, d, rate))
    return ops.act_mul(ops.concat((y, h)), activation=mixer.activation)


def _time_mix(r: Recurrence, x: Array) -> Array:
    """What stands in the place of attention in RWKV-4."""
    at, ops, size, hidden = r.at, r.at.ops, r.mixer.num_heads, r.at.hidden_size
    difference, before = _shift(r, x, 0)
    key, value, gate = (
        at.linear(f"{name}_proj", _blend(at, name, difference, before), size, hidden) for name in ("k", "v", "gate")
    )
    vectors, most = (at.param("a_log", size), at.param("bonus", size)), r.batch.max_query_len
    y, r.states[1] = ops.wkv(key, value, *vectors, r.states[1], *r.rows, max_query_len=most)
    return ops.gate(y, gate)


def _channel_mix(r: Recurrence, x: Array) -> Array:
    """The feed-forward block of RWKV-4: [num_tokens, hidden_size], of that shape."""
    at, ops, size, hidden = r.at, r.at.ops, r.mixer.mlp_size, r.at.hidden_size
    difference, before = _shift(r, x, 2)
    key = at.linear("up_proj", _blend(at, "k", difference, before), size, hidden)
    gate = at.linear("gate_proj", _blend(at, "gate", difference, before), hidden, hidden)
    y = at.linear("down_proj", ops.act(key, activation="relu2"), hidden, size)
    return ops.gate(at.scaled(y, r.mixer.out_scale), gate)


def _shift(r: Recurrence, x: Array, state: int) -> tuple[Array, Array]:
    """(x less what the token before had, what it had), of which blends of both are made. state: which one it is."""
    ops, size = r.at.ops, r.at.hidden_size
    weight = r.at.constant("conv.weight", size, 1, 2, compute=partial(shift_by_one, size))
    before, r.states[state] = ops.causal_conv(x, weight, None, r.states[state], *r.rows)
    return ops.add(x, ops.scale(before, -1.0)), before


def _blend(at: Scope, name: str, difference: Array, before: Array) -> Array:
    return at.ops.add(at.ops.mul(difference, at.param(f"{name}_mix", at.hidden_size)), before)


def _norm_groups(r: Recurrence, norm: NormSpec, y: Array) -> Array:
    """RMS norm over the values of each group of heads, with one weight for each value."""
    ops, size = r.at.ops, r.mixer.num_heads * r.mixer.head_dim
    groups = ops.split_heads(y, head_dim=size // r.mixer.num_key_heads)
    y = ops.merge_heads(ops.rms_norm(groups, None, eps=norm.eps))
    return ops.mul(y, r.at.param("norm.weight", size))
