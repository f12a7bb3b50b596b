"""Recurrences over positions in JAX: a scan over the tokens of a batch, or one step where every row has one."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ...stages import Array
from ._arrays import DTYPES, compiled, drop_negative, widen
from .elementwise import activate

if TYPE_CHECKING:
    from ...models.spec import Activation


def new_state(*, num_slots: int, shape: tuple[int, ...], dtype: str, device: Any) -> Array:
    """The states of one layer, zeroed. device: a JAX device or sharding."""
    return jnp.zeros((num_slots, *shape), DTYPES[dtype], device=device)


@compiled("activation")
def causal_conv(
    x: Array,
    weight: Array,
    bias: Array | None,
    state: Array,
    query_start_loc: Array,
    from_slots: Array,
    to_slots: Array,
    *,
    activation: "Activation | None" = None,
) -> tuple[Array, Array]:
    """([num_tokens, n], state); inputs before a row come from its state."""
    num_tokens, width = x.shape[0], weight.shape[-1]
    owners = _owners(query_start_loc, num_tokens)
    before = _load(state, from_slots).astype(x.dtype)[owners]  # [num_tokens, width - 1, n]
    y, windows = jnp.zeros(x.shape, jnp.float32), []
    place = jnp.arange(num_tokens) - query_start_loc[owners]
    for back in range(width - 1, -1, -1):  # oldest input first, as the definition sums
        rolled = jnp.roll(x, back, 0)
        if back:
            index = jnp.clip(width - 1 - back + place, 0, width - 2)
            old = jnp.take_along_axis(before, index[:, None, None], 1)[:, 0]
            rolled = jnp.where((place < back)[:, None], old, rolled)
        y = y + widen(rolled) * weight[:, 0, width - 1 - back]
        windows.append(rolled)
    if bias is not None:
        y = y + bias
    if activation is not None:
        y = activate(y, activation)
    return y.astype(x.dtype), _keep(state, jnp.stack(windows, 1)[:, 1:], to_slots)


@compiled("dt_min", "dt_max", "max_query_len")
def selective_scan(
    x: Array,
    dt: Array,
    b: Array,
    c: Array,
    a_log: Array,
    d: Array,
    dt_bias: Array,
    state: Array,
    query_start_loc: Array,
    from_slots: Array,
    to_slots: Array,
    *,
    dt_min: float = 0.0,
    dt_max: float = float("inf"),
    max_query_len: int = 0,
) -> tuple[Array, Array]:
    """([num_tokens, num_heads, head_dim], state)."""
    group = x.shape[1] // b.shape[1]
    step = jnp.clip(jax.nn.softplus(widen(dt) + dt_bias), dt_min, dt_max)[..., None]
    decay = jnp.exp(-step * jnp.exp(a_log).reshape(x.shape[1], -1))[:, :, None]
    b, c = (jnp.repeat(widen(array), group, 1) for array in (b, c))

    def advance(current: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
        x, decay, b, c = inputs
        current = current * decay + x[..., None] * b[:, :, None]
        return current, (current * c[:, :, None]).sum(-1)

    inputs = (widen(x) * step, decay, b, c)
    y, state = _recur(advance, inputs, state, query_start_loc, from_slots, to_slots, max_query_len)
    return (y + widen(x) * d[:, None]).astype(x.dtype), state


@compiled("beta_scale", "max_query_len")
def gated_delta(
    query: Array,
    key: Array,
    value: Array,
    dt: Array,
    beta: Array,
    a_log: Array,
    dt_bias: Array,
    state: Array,
    query_start_loc: Array,
    from_slots: Array,
    to_slots: Array,
    *,
    beta_scale: float = 1.0,
    max_query_len: int = 0,
) -> tuple[Array, Array]:
    """([num_tokens, num_heads, head_dim], state)."""
    num_tokens, num_heads, key_dim = value.shape[0], value.shape[1], key.shape[2]

    def unit(x: Array) -> Array:
        x = widen(x)
        x = x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-6)
        return jnp.repeat(x, num_heads // x.shape[1], 1)

    steps = widen(dt).reshape(num_tokens, num_heads, dt_bias.size // num_heads) + dt_bias.reshape(num_heads, -1)
    decay = jnp.exp(-jnp.exp(a_log)[:, None] * jax.nn.softplus(steps))[..., None]

    def advance(current: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
        query, key, value, rate, decay = inputs
        current = current * decay
        news = (value - (current * key[..., None]).sum(-2)) * rate[..., None]
        current = current + key[..., None] * news[:, :, None]
        return current, (current * query[..., None]).sum(-2)

    rate = beta_scale * jax.nn.sigmoid(widen(beta))
    inputs = (unit(query) * key_dim**-0.5, unit(key), widen(value), rate, decay)
    y, state = _recur(advance, inputs, state, query_start_loc, from_slots, to_slots, max_query_len)
    return y.astype(value.dtype), state


@compiled("max_query_len")
def wkv(
    key: Array,
    value: Array,
    a_log: Array,
    bonus: Array,
    state: Array,
    query_start_loc: Array,
    from_slots: Array,
    to_slots: Array,
    *,
    max_query_len: int = 0,
) -> tuple[Array, Array]:
    """([num_tokens, n], state)."""
    rate = jnp.exp(a_log)

    def join(top: Array, held: Array, new: Array, value: Array) -> Array:
        most = jnp.maximum(top, new)
        old, now = jnp.exp(top - most), jnp.exp(new - most)
        return jnp.stack([old * held[:, 0] + now * value, old * held[:, 1] + now, most], 1)

    def advance(held: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
        key, value = inputs
        top = jnp.where(held[:, 1] == 0, -jnp.inf, held[:, 2])
        mean = join(top, held, key + bonus, value)
        return join(top - rate, held, key, value), mean[:, 0] / mean[:, 1]

    inputs = (widen(key), widen(value))
    y, state = _recur(advance, inputs, state, query_start_loc, from_slots, to_slots, max_query_len)
    return y.astype(value.dtype), state


def _recur(
    advance: Callable[[Array, tuple[Array, ...]], tuple[Array, Array]],
    inputs: tuple[Array, ...],
    state: Array,
    query_start_loc: Array,
    from_slots: Array,
    to_slots: Array,
    max_query_len: int,
) -> tuple[Array, Array]:
    """The outputs of all tokens, and the states. advance: (states [n, ...], inputs [n, ...]) -> (states, outputs)."""
    num_tokens = to_slots.shape[0]
    owners, before = _owners(query_start_loc, num_tokens), _load(state, from_slots)
    if max_query_len == 1 or not num_tokens:
        current, y = advance(before[owners], inputs)
        return y, _keep(state, current, to_slots)

    def one(carry: tuple[Array, Array], token: Any) -> tuple[tuple[Array, Array], Array]:
        (current, state), (owner, is_first, slot, arrays) = carry, token
        current = jnp.where(is_first, before[owner][None], current)
        current, y = advance(current, tuple(array[None] for array in arrays))
        return (current, _keep(state, current, slot[None])), y[0]

    is_first = query_start_loc[owners] == jnp.arange(num_tokens)
    (_, state), y = jax.lax.scan(one, (before[:1], state), (owners, is_first, to_slots, inputs))
    return y, state


def _owners(query_start_loc: Array, num_tokens: int) -> Array:
    """The request of each token; padding belongs to the last one."""
    places = jnp.arange(num_tokens, dtype=jnp.int32)
    owners = jnp.searchsorted(query_start_loc[1:], places, side="right")
    return jnp.minimum(owners, query_start_loc.shape[0] - 2).astype(jnp.int32)


def _load(state: Array, from_slots: Array) -> Array:
    """The states before each row: [num_reqs, *shape]."""
    slots = from_slots[:, 0].reshape(-1, *(1,) * (state.ndim - 1))
    return jnp.where(slots < 0, jnp.zeros((), state.dtype), state[jnp.maximum(from_slots[:, 0], 0)])


def _keep(state: Array, values: Array, to_slots: Array) -> Array:
    return state.at[drop_negative(to_slots, state.shape[0])].set(values.astype(state.dtype), mode="drop")


@compiled()
def lru_inputs(
    x: Array,
    input_gates: Array,
    decay_gates: Array,
    input_bias: Array,
    decay_bias: Array,
    log_rate: Array,
    positions: Array,
) -> tuple[Array, Array, Array]:
    """(x, dt, ones) of `selective_scan` for a real-gated linear recurrent unit."""
    u = jnp.exp(log_rate) * jax.nn.sigmoid(widen(decay_gates) + decay_bias)
    root = jnp.where(positions[:, None] == 0, 1.0, jnp.sqrt(-jnp.expm1(-2 * u)))
    taken = root * jax.nn.sigmoid(widen(input_gates) + input_bias) * widen(x)
    dt = jnp.log(jnp.expm1(u)) - log_rate
    return (taken / u).astype(x.dtype), dt.astype(x.dtype), jnp.ones_like(x[:, :1])


FUNCTIONS = (new_state, causal_conv, selective_scan, gated_delta, wkv, lru_inputs)
