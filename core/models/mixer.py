"""Recurrences in the place of attention inside a forward function, and the states that they keep."""

from dataclasses import dataclass

from ..stages import Array, ForwardBatch
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

    def convolve(self, x: Array) -> Array:
        """The short convolution over time, with the activation behind it: [num_tokens, channels]."""
        at, mixer = self.at, self.mixer
        bias = at.param("conv.bias") if mixer.conv_bias else None
        activation: Activation | None = None if mixer.kind in ("conv", "lru") else mixer.activation
        weight = at.param("conv.weight")
        x, self.states[0] = at.ops.causal_conv(x, weight, bias, self.states[0], *self.rows, activation=activation)
        return x

    def scan(self, x: Array, dt: Array, b: Array, c: Array) -> Array:
        """The selective state space over rows of joined heads: [num_tokens, num_heads * head_dim]."""
        at, mixer = self.at, self.mixer
        y, self.states[-1] = at.ops.selective_scan(
            at.ops.split_heads(x, head_dim=mixer.head_dim),
            dt,
            at.ops.split_heads(b, head_dim=mixer.state_size),
            at.ops.split_heads(c, head_dim=mixer.state_size),
            at.param("a_log"),
            at.param("d"),
            at.param("dt_bias"),
            self.states[-1],
            *self.rows,
            dt_min=mixer.dt_limit[0],
            dt_max=mixer.dt_limit[1],
            max_query_len=self.batch.max_query_len,
        )
        return at.ops.merge_heads(y)


def mix(at: Scope, mixer: MixerSpec, x: Array, sight: Sight) -> Array:
    """The mixer's output for x: [num_tokens, hidden_size], of that shape."""
    r, x = _open(at, mixer, sight), at.scaled(x, mixer.in_scale)
    projected: Array = None if mixer.kind == "wkv" else at.linear("in_proj", x, mixer.bias)
    match mixer.kind:
        case "wkv":
            out = _time_mix(r, x)
        case "mamba":
            out = _mamba(r, projected)
        case "mamba2":
            out = _mamba2(r, projected)
        case "delta":
            out = _delta(r, projected, x)
        case "lightning":
            out = _lightning(r, projected, x)
        case "conv":
            out = _conv(r, projected)
        case "lru":
            out = _lru(r, projected)
    sight.caches.states[sight.layer_idx] = tuple(r.states)
    return at.scaled(at.linear("out_proj", out, mixer.out_bias), mixer.out_scale)


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
    """x: [num_tokens, 2 * num_heads], values and gate."""
    at, mixer, ops = r.at, r.mixer, r.at.ops
    x, z = ops.split(x, (mixer.num_heads, mixer.num_heads))
    x = r.convolve(x)
    dt, b, c = ops.split(at.linear("x_proj", x), (mixer.dt_rank, mixer.state_size, mixer.state_size))
    if mixer.norm is not None:
        dt = at.normalize(mixer.norm, "dt_norm", dt)
        b = at.normalize(mixer.norm, "b_norm", b)
        c = at.normalize(mixer.norm, "c_norm", c)
    y = r.scan(x, at.linear("dt_proj", dt), b, c)
    return ops.act_mul(ops.concat((z, y)), activation="silu")


def _mamba2(r: Recurrence, x: Array) -> Array:
    """x: [num_tokens, n], gate, values, b, c and a step size for each head."""
    mixer, ops = r.mixer, r.at.ops
    size, keys = mixer.num_heads * mixer.head_dim, mixer.num_key_heads * mixer.state_size
    if mixer.multipliers:
        x = ops.mul(x, r.at.param("multipliers"))
    z, x, dt = ops.split(x, (size, size + 2 * keys, mixer.num_heads))
    x, b, c = ops.split(r.convolve(x), (size, keys, keys))
    y = r.scan(x, dt, b, c)
    if mixer.norm is not None and mixer.norm_first:
        y = _norm_groups(r, mixer.norm, y)
    y = ops.act_mul(ops.concat((z, y)), activation="silu")
    return y if mixer.norm is None or mixer.norm_first else _norm_groups(r, mixer.norm, y)


def _delta(r: Recurrence, x: Array, inputs: Array) -> Array:
    """x: [num_tokens, n], query, key, value and, unless it comes from a latent, the gate; inputs: of the mixer."""
    at, mixer, ops = r.at, r.mixer, r.at.ops
    size, keys = mixer.num_heads * mixer.head_dim, mixer.num_key_heads * mixer.state_size
    beta = at.linear("gates_proj", inputs)
    if mixer.decay_rank:
        decay = at.linear("decay_b_proj", at.linear("decay_a_proj", inputs))
        dt = ops.split_heads(decay, head_dim=mixer.state_size)
    else:
        beta, dt = ops.split(beta, (mixer.num_heads, mixer.num_heads))
    if mixer.gate_rank:
        z = at.linear("gate_b_proj", at.linear("gate_a_proj", inputs))
    else:
        x, z = ops.split(x, (2 * keys + size, size))
    query, key, value = ops.split(r.convolve(x), (keys, keys, size))
    y, r.states[-1] = ops.gated_delta(
        ops.split_heads(query, head_dim=mixer.state_size),
        ops.split_heads(key, head_dim=mixer.state_size),
        ops.split_heads(value, head_dim=mixer.head_dim),
        dt,
        beta,
        at.param("a_log"),
        at.param("dt_bias"),
        r.states[-1],
        *r.rows,
        beta_scale=mixer.beta_scale,
        max_query_len=r.batch.max_query_len,
    )
    y = ops.merge_heads(y if mixer.norm is None else at.normalize(mixer.norm, "norm", y))
    return (
        ops.gate(y, z) if mixer.gate_activation == "sigmoid" else ops.act_mul(ops.concat((z, y)), activation="silu")
    )


def _lightning(r: Recurrence, x: Array, inputs: Array) -> Array:
    """x: [num_tokens, n], query, key and value; inputs: of the mixer. A selective state space with steps of 1."""
    mixer, ops, size = r.mixer, r.at.ops, r.mixer.num_heads * r.mixer.head_dim
    query, key, value = ops.split(ops.act(x, activation=mixer.activation), (size, size, size))
    dt, _ = ops.split(x, (mixer.num_heads, 3 * size - mixer.num_heads))  # cut to 1, whatever it is
    y = r.scan(value, dt, key, query)
    y = y if mixer.norm is None else r.at.normalize(mixer.norm, "norm", y)
    return ops.gate(y, r.at.linear("gate_proj", inputs))


def _conv(r: Recurrence, x: Array) -> Array:
    """x: [num_tokens, 3 * num_heads], gates before and behind the convolution, and values."""
    ops = r.at.ops
    b, c, x = ops.split(x, (r.mixer.num_heads,) * 3)
    return ops.mul(c, r.convolve(ops.mul(b, x)))


def _lru(r: Recurrence, x: Array) -> Array:
    """x: [num_tokens, 2 * num_heads], what multiplies the output, and values. A selective state space of one number
    for each channel, which is written and read as it is."""
    at, ops, size = r.at, r.at.ops, r.mixer.num_heads
    y, x = ops.split(x, (size, size))
    x = r.convolve(x)
    blocks = ops.split_heads(x, head_dim=size // r.mixer.num_blocks)
    enters = ops.merge_heads(ops.absorb_keys(blocks, at.param("input_gate.weight")))
    decays = ops.merge_heads(ops.absorb_keys(blocks, at.param("decay_gate.weight")))
    biases = (at.param("input_gate.bias"), at.param("decay_gate.bias"))
    taken, dt, one = ops.lru_inputs(x, enters, decays, *biases, at.param("dt_bias"), r.batch.positions)
    h = r.scan(taken, dt, one, one)
    return ops.act_mul(ops.concat((y, h)), activation=r.mixer.activation)


def _time_mix(r: Recurrence, x: Array) -> Array:
    """What stands in the place of attention in RWKV-4: [num_tokens, hidden_size] -> [num_tokens, num_heads]."""
    at, ops = r.at, r.at.ops
    difference, before = _shift(r, x, 0)
    key, value, gate = (at.linear(f"{name}_proj", _blend(r, name, difference, before)) for name in ("k", "v", "gate"))
    vectors = (at.param("a_log"), at.param("bonus"))
    y, r.states[1] = ops.wkv(key, value, *vectors, r.states[1], *r.rows, max_query_len=r.batch.max_query_len)
    return ops.gate(y, gate)


def _channel_mix(r: Recurrence, x: Array) -> Array:
    """The feed-forward block of RWKV-4: [num_tokens, hidden_size], of that shape."""
    at, ops = r.at, r.at.ops
    difference, before = _shift(r, x, 2)
    key = at.linear("up_proj", _blend(r, "k", difference, before))
    gate = at.linear("gate_proj", _blend(r, "gate", difference, before))
    y = at.linear("down_proj", ops.act(key, activation="relu2"))
    return ops.gate(at.scaled(y, r.mixer.out_scale), gate)


def _shift(r: Recurrence, x: Array, state: int) -> tuple[Array, Array]:
    """(x less what the token before had, what it had), of which blends of both are made. state: which one it is."""
    ops = r.at.ops
    before, r.states[state] = ops.causal_conv(x, r.at.param("conv.weight"), None, r.states[state], *r.rows)
    return ops.add(x, ops.scale(before, -1.0)), before


def _blend(r: Recurrence, name: str, difference: Array, before: Array) -> Array:
    return r.at.ops.add(r.at.ops.mul(difference, r.at.param(f"{name}_mix")), before)


def _norm_groups(r: Recurrence, norm: NormSpec, y: Array) -> Array:
    """RMS norm over the values of each group of heads, with one weight for each value."""
    ops, size = r.at.ops, r.mixer.num_heads * r.mixer.head_dim // r.mixer.num_key_heads
    y = ops.merge_heads(ops.rms_norm(ops.split_heads(y, head_dim=size), None, eps=norm.eps))
    return ops.mul(y, r.at.param("norm.weight"))
