"""Recurrences in the place of attention inside a forward function, and the states that they keep."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..ops.table import OpTable
from ..stages import Array, ForwardBatch
from .norms import Params, normalize
from .spec import Activation, MixerSpec, NormSpec

States = Sequence[Array]
"""The states of one layer, as `state_shapes` lists them."""
Rows = tuple[Array, Array, Array]
"""query_start_loc, from_slots and to_slots, as ops over states take them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """One array of a state: its shape, and whether it is float32 whatever the model's dtype is."""

    shape: tuple[int, ...]
    is_float32: bool


def state_shapes(mixer: MixerSpec) -> tuple[StateShape, ...]:
    """The arrays of one state, in the order in which `mix` takes them: inputs of the convolution, recurrence."""
    conv = StateShape(shape=(mixer.conv_width - 1, conv_channels(mixer)), is_float32=False)
    match mixer.kind:
        case "conv":
            return (conv,)
        case "delta":
            return conv, StateShape(shape=(mixer.num_heads, mixer.state_size, mixer.head_dim), is_float32=True)
        case _:
            return conv, StateShape(shape=(mixer.num_heads, mixer.head_dim, mixer.state_size), is_float32=True)


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
    bias = params[f"{prefix}in_proj.bias"] if mixer.bias else None
    projected = ops.linear(x, params[f"{prefix}in_proj.weight"], bias)
    match mixer.kind:
        case "mamba":
            out, states = _mamba(ops, mixer, params, prefix, projected, states, rows, batch.max_query_len)
        case "mamba2":
            out, states = _mamba2(ops, mixer, params, prefix, projected, states, rows, batch.max_query_len)
        case "delta":
            gates = ops.linear(x, params[f"{prefix}gates_proj.weight"])
            out, states = _delta(ops, mixer, params, prefix, projected, gates, states, rows, batch.max_query_len)
        case "conv":
            out, states = _conv(ops, mixer, params, prefix, projected, states, rows)
    bias = params[f"{prefix}out_proj.bias"] if mixer.out_bias else None
    out = ops.linear(out, params[f"{prefix}out_proj.weight"], bias)
    return (out if mixer.out_scale == 1.0 else ops.scale(out, mixer.out_scale)), states


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
    gates: Array,
    states: States,
    rows: Rows,
    most: int,
) -> tuple[Array, States]:
    """x: [num_tokens, n], query, key, value and gate; gates: beta and a step size for each head."""
    size, keys = mixer.num_heads * mixer.head_dim, mixer.num_key_heads * mixer.state_size
    x, z = ops.split(x, (2 * keys + size, size))
    x, conv_state = _causal_conv(ops, mixer, params, prefix, x, states[0], rows)
    query, key, value = ops.split(x, (keys, keys, size))
    beta, dt = ops.split(gates, (mixer.num_heads, mixer.num_heads))
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
    return ops.act_mul(ops.concat((z, ops.merge_heads(y))), activation="silu"), (conv_state, delta_state)


def _conv(
    ops: OpTable, mixer: MixerSpec, params: Params, prefix: str, x: Array, states: States, rows: Rows
) -> tuple[Array, States]:
    """x: [num_tokens, 3 * num_heads], gates before and behind the convolution, and values."""
    b, c, x = ops.split(x, (mixer.num_heads,) * 3)
    y, conv_state = _causal_conv(ops, mixer, params, prefix, ops.mul(b, x), states[0], rows)
    return ops.mul(c, y), (conv_state,)


def _causal_conv(
    ops: OpTable, mixer: MixerSpec, params: Params, prefix: str, x: Array, state: Array, rows: Rows
) -> tuple[Array, Array]:
    bias = params[f"{prefix}conv.bias"] if mixer.conv_bias else None
    activation: Activation | None = None if mixer.kind == "conv" else "silu"
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
