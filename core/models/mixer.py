"""Recurrences in the place of attention inside a forward function, and the states that they keep."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..ops.table import OpTable
from ..stages import Array, ForwardBatch
from .norms import Params, normalize
from .spec import Activation, MixerSpec, NormSpec
from .time_mix import Rows, channel_mix, time_mix

States = Sequence[Array]
"""The states of one layer, as `state_shapes` lists them."""


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


def mix(
    ops: OpTable,
    mixer: MixerSpec,
    params: Params,
    prefix: str,
    x: Array,
    states: States,
    group: int,
    batch: ForwardBatch,
) -> tuple[Array, States]:
    """The mixer's output for x: [num_tokens, hidden_size], of that shape, and the states of the layer.

    group: the state group, by which the batch says where states come from and where they are kept.
    """
    rows = (batch.query_start_loc, batch.block_tables[group], batch.slot_mappings[group])
    if mixer.in_scale != 1.0:
        x = ops.scale(x, mixer.in_scale)
    if mixer.kind != "wkv":
        bias = params[f"{prefix}in_proj.bias"] if mixer.bias else None
        projected = ops.linear(x, params[f"{prefix}in_proj.weight"], bias)
    match mixer.kind:
        case "wkv":
            out, states = time_mix(ops, mixer, params, prefix, x, states, rows, batch.max_query_len)
        case "mamba":
            out, states = _mamba(ops, mixer, params, prefix, projected, states, rows, batch.max_query_len)
        case "mamba2":
            out, states = _mamba2(ops, mixer, params, prefix, projected, states, rows, batch.max_query_len)
        case "delta":
            out, states = _delta(ops, mixer, params, prefix, projected, x, states, rows, batch.max_query_len)
        case "lightning":
            out, states = _lightning(ops, mixer, params, prefix, projected, x, states, rows, batch.max_query_len)
        case "conv":
            out, states = _conv(ops, mixer, params, prefix, projected, states, rows)
        case "lru":
            out, states = _lru(ops, mixer, params, prefix, projected, states, rows, batch)
    bias = params[f"{prefix}out_proj.bias"] if mixer.out_bias else None
    out = ops.linear(out, params[f"{prefix}out_proj.weight"], bias)
    return (out if mixer.out_scale == 1.0 else ops.scale(out, mixer.out_scale)), states


def mix_channels(
    ops: OpTable,
    mixer: MixerSpec,
    params: Params,
    prefix: str,
    x: Array,
    states: States,
    group: int,
    batch: ForwardBatch,
) -> tuple[Array, States]:
    """The feed-forward block of a layer that keeps a state of it, and the states: as `mix`."""
    rows = (batch.query_start_loc, batch.block_tables[group], batch.slot_mappings[group])
    return channel_mix(ops, mixer, params, prefix, x, states, rows)


def _mamba(
    ops: OpTable, mixer: MixerSpec, params: Params, prefix: str, x: Array, states: States, rows: Rows, most: int
) -> tuple[Array, States]:
    """x: [num_tokens, 2 * num_heads], values and gate."""
    x, z = ops.split(x, (mixer.num_heads, mixer.num_heads))
    x, conv_state = _causal_conv(ops, mixer, params, prefix, x, states[0], rows)
    parts = ops.linear(x, params[f"{prefix}x_proj.weight"])
    dt, b, c = ops.split(parts, (mixer.dt_rank, mixer.state_size, mixer.state_size))
    if mixer.norm is not None:
        dt = normalize(ops, mixer.norm, params, f"{prefix}dt_norm.", dt)
        b = normalize(ops, mixer.norm, params, f"{prefix}b_norm.", b)
        c = normalize(ops, mixer.norm, params, f"{prefix}c_norm.", c)
    dt = ops.linear(dt, params[f"{prefix}dt_proj.weight"])
    y, ssm_state = _selective_scan(ops, mixer, params, prefix, (x, dt, b, c), states[1], rows, most)
    return ops.act_mul(ops.concat((z, y)), activation="silu"), (conv_state, ssm_state)


def _mamba2(
    ops: OpTable, mixer: MixerSpec, params: Params, prefix: str, x: Array, states: States, rows: Rows, most: int
) -> tuple[Array, States]:
    """x: [num_tokens, n], gate, values, b, c and a step size for each head."""
    size, keys = mixer.num_heads * mixer.head_dim, mixer.num_key_heads * mixer.state_size
    if mixer.multipliers:
        x = ops.mul(x, params[f"{prefix}multipliers"])
    z, x, dt = ops.split(x, (size, size + 2 * keys, mixer.num_heads))
    x, conv_state = _causal_conv(ops, mixer, params, prefix, x, states[0], rows)
    x, b, c = ops.split(x, (size, keys, keys))
    y, ssm_state = _selective_scan(ops, mixer, params, prefix, (x, dt, b, c), states[1], rows, most)
    if mixer.norm is not None and mixer.norm_first:
        y = _norm_groups(ops, mixer, mixer.norm, params, prefix, y)
    y = ops.act_mul(ops.concat((z, y)), activation="silu")
    if mixer.norm is not None and not mixer.norm_first:
        y = _norm_groups(ops, mixer, mixer.norm, params, prefix, y)
    return y, (conv_state, ssm_state)


def _delta(
    ops: OpTable,
    mixer: MixerSpec,
    params: Params,
    prefix: str,
    x: Array,
    inputs: Array,
    states: States,
    rows: Rows,
    most: int,
) -> tuple[Array, States]:
    """x: [num_tokens, n], query, key, value and, unless it comes from a latent, the gate; inputs: of the mixer."""
    size, keys = mixer.num_heads * mixer.head_dim, mixer.num_key_heads * mixer.state_size
    beta = ops.linear(inputs, params[f"{prefix}gates_proj.weight"])
    if mixer.decay_rank:
        dt = ops.split_heads(_from_latent(ops, params, f"{prefix}decay", inputs), head_dim=mixer.state_size)
    else:
        beta, dt = ops.split(beta, (mixer.num_heads, mixer.num_heads))
    if mixer.gate_rank:
        z = _from_latent(ops, params, f"{prefix}gate", inputs)
    else:
        x, z = ops.split(x, (2 * keys + size, size))
    x, conv_state = _causal_conv(ops, mixer, params, prefix, x, states[0], rows)
    query, key, value = ops.split(x, (keys, keys, size))
    y, delta_state = ops.gated_delta(
        ops.split_heads(query, head_dim=mixer.state_size),
        ops.split_heads(key, head_dim=mixer.state_size),
        ops.split_heads(value, head_dim=mixer.head_dim),
        dt,
        beta,
        params[f"{prefix}a_log"],
        params[f"{prefix}dt_bias"],
        states[1],
        *rows,
        beta_scale=mixer.beta_scale,
        max_query_len=most,
    )
    if mixer.norm is not None:
        y = normalize(ops, mixer.norm, params, f"{prefix}norm.", y)
    y = ops.merge_heads(y)
    y = ops.gate(y, z) if mixer.gate_activation == "sigmoid" else ops.act_mul(ops.concat((z, y)), activation="silu")
    return y, (conv_state, delta_state)


def _from_latent(ops: OpTable, params: Params, name: str, x: Array) -> Array:
    return ops.linear(ops.linear(x, params[f"{name}_a_proj.weight"]), params[f"{name}_b_proj.weight"])


def _lightning(
    ops: OpTable,
    mixer: MixerSpec,
    params: Params,
    prefix: str,
    x: Array,
    inputs: Array,
    states: States,
    rows: Rows,
    most: int,
) -> tuple[Array, States]:
    """x: [num_tokens, n], query, key and value; inputs: of the mixer. A selective state space with steps of 1."""
    size = mixer.num_heads * mixer.head_dim
    query, key, value = ops.split(ops.act(x, activation=mixer.activation), (size, size, size))
    dt, _ = ops.split(x, (mixer.num_heads, 3 * size - mixer.num_heads))  # cut to 1, whatever it is
    y, state = _selective_scan(ops, mixer, params, prefix, (value, dt, key, query), states[0], rows, most)
    if mixer.norm is not None:
        y = normalize(ops, mixer.norm, params, f"{prefix}norm.", y)
    return ops.gate(y, ops.linear(inputs, params[f"{prefix}gate_proj.weight"])), (state,)


def _conv(
    ops: OpTable, mixer: MixerSpec, params: Params, prefix: str, x: Array, states: States, rows: Rows
) -> tuple[Array, States]:
    """x: [num_tokens, 3 * num_heads], gates before and behind the convolution, and values."""
    b, c, x = ops.split(x, (mixer.num_heads,) * 3)
    y, conv_state = _causal_conv(ops, mixer, params, prefix, ops.mul(b, x), states[0], rows)
    return ops.mul(c, y), (conv_state,)


def _lru(
    ops: OpTable,
    mixer: MixerSpec,
    params: Params,
    prefix: str,
    x: Array,
    states: States,
    rows: Rows,
    batch: ForwardBatch,
) -> tuple[Array, States]:
    """x: [num_tokens, 2 * num_heads], what multiplies the output, and values. A selective state space of one number
    for each channel, which is written and read as it is."""
    size = mixer.num_heads
    y, x = ops.split(x, (size, size))
    x, conv_state = _causal_conv(ops, mixer, params, prefix, x, states[0], rows)
    blocks = ops.split_heads(x, head_dim=size // mixer.num_blocks)
    enters = ops.merge_heads(ops.absorb_keys(blocks, params[f"{prefix}input_gate.weight"]))
    decays = ops.merge_heads(ops.absorb_keys(blocks, params[f"{prefix}decay_gate.weight"]))
    enter_bias, decay_bias = params[f"{prefix}input_gate.bias"], params[f"{prefix}decay_gate.bias"]
    rate = params[f"{prefix}dt_bias"]
    taken, dt, one = ops.lru_inputs(x, enters, decays, enter_bias, decay_bias, rate, batch.positions)
    inputs = (taken, dt, one, one)
    h, state = _selective_scan(ops, mixer, params, prefix, inputs, states[1], rows, batch.max_query_len)
    return ops.act_mul(ops.concat((y, h)), activation=mixer.activation), (conv_state, state)


def _causal_conv(
    ops: OpTable, mixer: MixerSpec, params: Params, prefix: str, x: Array, state: Array, rows: Rows
) -> tuple[Array, Array]:
    bias = params[f"{prefix}conv.bias"] if mixer.conv_bias else None
    activation: Activation | None = None if mixer.kind in ("conv", "lru") else mixer.activation
    return ops.causal_conv(x, params[f"{prefix}conv.weight"], bias, state, *rows, activation=activation)


def _selective_scan(
    ops: OpTable,
    mixer: MixerSpec,
    params: Params,
    prefix: str,
    inputs: tuple[Array, Array, Array, Array],
    state: Array,
    rows: Rows,
    most: int,
) -> tuple[Array, Array]:
    """The recurrence of both Mambas over rows of joined heads: x, dt, b and c."""
    x, dt, b, c = inputs
    y, state = ops.selective_scan(
        ops.split_heads(x, head_dim=mixer.head_dim),
        dt,
        ops.split_heads(b, head_dim=mixer.state_size),
        ops.split_heads(c, head_dim=mixer.state_size),
        params[f"{prefix}a_log"],
        params[f"{prefix}d"],
        params[f"{prefix}dt_bias"],
        state,
        *rows,
        dt_min=mixer.dt_limit[0],
        dt_max=mixer.dt_limit[1],
        max_query_len=most,
    )
    return ops.merge_heads(y), state


def _norm_groups(ops: OpTable, mixer: MixerSpec, norm: NormSpec, params: Params, prefix: str, y: Array) -> Array:
    """RMS norm over the values of each group of heads, with one weight for each value."""
    size = mixer.num_heads * mixer.head_dim // mixer.num_key_heads
    y = ops.merge_heads(ops.rms_norm(ops.split_heads(y, head_dim=size), None, eps=norm.eps))
    return ops.mul(y, params[f"{prefix}norm.weight"])
