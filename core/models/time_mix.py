"""The two blocks of an RWKV-4 layer inside a forward function, and their parameters: each reads its input mixed with
that of the token before."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from ..ops.table import OpTable
from ..stages import Array
from . import leaves
from .norms import Params
from .params import Param
from .spec import MixerSpec

Rows = tuple[Array, Array, Array]
"""query_start_loc, from_slots and to_slots, as ops over states take them."""


def time_mix(
    ops: OpTable,
    mixer: MixerSpec,
    params: Params,
    prefix: str,
    x: Array,
    states: Sequence[Array],
    rows: Rows,
    most: int,
) -> tuple[Array, Sequence[Array]]:
    """What stands in the place of attention, for x: [num_tokens, hidden_size], before out_proj: [num_tokens,
    num_heads]; and the states of the layer."""
    x, before, shift_state = _shifted(ops, params, f"{prefix}conv.weight", x, states[0], rows)
    key, value, gate = (
        ops.linear(_mixed(ops, params[f"{prefix}{name}_mix"], x, before), params[f"{prefix}{name}_proj.weight"])
        for name in ("k", "v", "gate")
    )
    vectors = (params[f"{prefix}a_log"], params[f"{prefix}bonus"])
    y, sums = ops.wkv(key, value, *vectors, states[1], *rows, max_query_len=most)
    return ops.gate(y, gate), (shift_state, sums, states[2])


def channel_mix(
    ops: OpTable, mixer: MixerSpec, params: Params, prefix: str, x: Array, states: Sequence[Array], rows: Rows
) -> tuple[Array, Sequence[Array]]:
    """The feed-forward block, for x: [num_tokens, hidden_size], of that shape; and the states of the layer."""
    x, before, shift_state = _shifted(ops, params, f"{prefix}conv.weight", x, states[2], rows)
    key = ops.linear(_mixed(ops, params[f"{prefix}k_mix"], x, before), params[f"{prefix}up_proj.weight"])
    gate = ops.linear(_mixed(ops, params[f"{prefix}gate_mix"], x, before), params[f"{prefix}gate_proj.weight"])
    y = ops.linear(ops.act(key, activation="relu2"), params[f"{prefix}down_proj.weight"])
    y = y if mixer.out_scale == 1.0 else ops.scale(y, mixer.out_scale)
    return ops.gate(y, gate), (states[0], states[1], shift_state)


def time_mix_params(mixer: MixerSpec, prefix: str, hidden_size: int) -> Iterator[Param]:
    """Of the block in the place of attention, but for out_proj."""
    yield from _mixes(prefix, hidden_size, ("k", "v", "gate"))
    for name in ("k", "v", "gate"):
        yield from leaves.linear(f"{prefix}.{name}_proj", mixer.num_heads, hidden_size, "replicated", False)
    for name in ("a_log", "bonus"):
        yield Param(name=f"{prefix}.{name}", shape=(mixer.num_heads,), kind="vector")


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


def _shifted(
    ops: OpTable, params: Params, weight: str, x: Array, state: Array, rows: Rows
) -> tuple[Array, Array, Array]:
    """(x less what the token before had, what it had, the state): all that mixtures of both are made of."""
    before, state = ops.causal_conv(x, params[weight], None, state, *rows)
    return ops.add(x, ops.scale(before, -1.0)), before, state


def _mixed(ops: OpTable, share: Array, difference: Array, before: Array) -> Array:
    return ops.add(ops.mul(difference, share), before)


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
