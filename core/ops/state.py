"""Recurrences over the positions of a ragged batch, and the states that they carry from one step to the next.

One family: the ops share the layout of the state cache. A row begins behind the state in `from_slots` and leaves
states in `to_slots`; nothing else of the cache is read or written, and no slot that one request writes is read by
another in the same step, so that requests may run side by side. Positions are taken one after
the other, for prompts as for single tokens: there is one order of sums, whatever steps a request is computed in.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..stages import Array

if TYPE_CHECKING:
    import torch

    from ..models.spec import Activation


def new_state(*, num_slots: int, shape: tuple[int, ...], dtype: str, device: str) -> Array:
    """The states of one layer, zeroed: an opaque object for the other ops here. One state has `shape`.

    The definition holds [num_slots, *shape].
    """
    from ._torch import zeros

    return zeros((num_slots, *shape), dtype, device)


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
    """A short convolution over each channel's last `width` inputs, and an activation.

    x: [num_tokens, n]; request r owns rows query_start_loc[r] : query_start_loc[r + 1]. weight: float32
    [n, 1, width], the newest input last; bias: float32 [n]. state: [num_slots, width - 1, n] in x's dtype, inputs
    before the row, oldest first. from_slots: int32 [num_reqs, ...], column 0 is the slot of the state before the
    row, -1: zeros. to_slots: int32 [num_tokens], where the state after a token is kept, -1: nowhere (or in the null
    block).
    Sums in float32 at least. Mutates state; returns ([num_tokens, n] in x's dtype, state or its successor).
    """
    import torch

    from .elementwise import activate

    num_reqs, width = len(query_start_loc) - 1, weight.shape[-1]
    starts, requests = query_start_loc.long(), _owners(query_start_loc, len(x))
    history = torch.cat([_load(state, from_slots).flatten(0, 1).to(x.dtype), x])  # states of all requests, then x
    back = torch.arange(1 - width, 1, device=x.device)
    place = (torch.arange(len(x), device=x.device) - starts[requests])[:, None] + back  # below 0: in the state
    in_state = requests[:, None] * (width - 1) + (width - 1) + place
    in_x = num_reqs * (width - 1) + starts[requests][:, None] + place
    windows = history[torch.where(place < 0, in_state, in_x)]  # [num_tokens, width, n]
    wide = torch.promote_types(x.dtype, torch.float32)
    y = (windows.to(wide) * weight[:, 0].T.to(wide)).sum(1)
    if bias is not None:
        y = y + bias
    if activation is not None:
        y = activate(y, activation)
    _keep(state, windows[:, 1:], to_slots)
    return y.to(x.dtype), state


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
    """The selective state space of Mamba (Gu and Dao 2023; with a matrix a_log) and Mamba-2 (Dao and Gu 2024).

    For each head, with dt = clamp(softplus(dt + dt_bias), dt_min, dt_max):
    state = state * exp(-dt * exp(a_log)) + (dt * x) outer b;  y = state @ c + d * x.

    x: [num_tokens, num_heads, head_dim]; dt: [num_tokens, num_heads]; b, c: [num_tokens, num_groups, state_size],
    of which head h reads group h // (num_heads / num_groups); a_log: float32 [num_heads] or [num_heads, state_size];
    d, dt_bias: float32 [num_heads]. state: float32 [num_slots, num_heads, head_dim, state_size].
    query_start_loc, from_slots, to_slots: as in `causal_conv`. max_query_len: an upper bound, 0 if unknown.
    In float32 at least. Mutates state; returns (y of x's shape and dtype, state or its successor).
    """
    import torch
    import torch.nn.functional as F

    wide = torch.promote_types(x.dtype, torch.float32)
    group = x.shape[1] // b.shape[1]
    step = F.softplus(dt.to(wide) + dt_bias).clamp(dt_min, dt_max)[..., None]  # [num_tokens, num_heads, 1]
    decay = torch.exp(-step * a_log.exp().view(x.shape[1], -1))[:, :, None]  # [num_tokens, num_heads, 1, 1 or n]
    inputs = x.to(wide) * step
    b, c = (array.to(wide).repeat_interleave(group, 1) for array in (b, c))
    current, y = _before(state, from_slots, query_start_loc, len(x), max_query_len), torch.empty_like(inputs)
    for requests, tokens in _in_step(query_start_loc, max_query_len):
        outer = inputs[tokens][..., None] * b[tokens][:, :, None]
        current[requests] = current[requests] * decay[tokens] + outer
        y[tokens] = (current[requests] * c[tokens][:, :, None]).sum(-1)
        _keep(state, current[requests], to_slots[tokens])
    return (y + x.to(wide) * d[:, None]).to(x.dtype), state


def lru_inputs(
    x: Array,
    input_gates: Array,
    decay_gates: Array,
    input_bias: Array,
    decay_bias: Array,
    log_rate: Array,
    positions: Array,
) -> tuple[Array, Array, Array]:
    """The real-gated linear recurrent unit (De et al. 2024, eq. 1 to 4) as what `selective_scan` takes.

    A channel decays by exp(-u) where u = exp(log_rate) * sigmoid(decay_gates + decay_bias), and takes
    sqrt(1 - exp(-2 u)) * sigmoid(input_gates + input_bias) * x in, at position 0 without the root. In the scan a_log
    is 0, dt_bias is log_rate, and b and c are 1. x, input_gates, decay_gates: [num_tokens, n]; biases, log_rate:
    float32 [n]; positions: int32 [num_tokens]. Returns x and dt of x's shape and dtype, and ones of its dtype,
    [num_tokens, 1].
    """
    import torch

    wide = torch.promote_types(x.dtype, torch.float32)
    u = log_rate.exp() * (decay_gates.to(wide) + decay_bias).sigmoid()
    root = torch.where(positions[:, None] == 0, torch.ones_like(u), (-torch.expm1(-2 * u)).sqrt())
    taken = root * (input_gates.to(wide) + input_bias).sigmoid() * x.to(wide)
    return (taken / u).to(x.dtype), (u.expm1().log() - log_rate).to(x.dtype), torch.ones_like(x[:, :1])


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
    """The gated delta rule (Yang et al. 2024), its decay for each head or for each value of its keys (Kimi Linear).

    For each head, with query and key divided by their length (x / sqrt(sum(x^2) + 1e-6)), query besides by
    sqrt(key_dim), and beta = beta_scale * sigmoid(beta):
    state = state * exp(-exp(a_log) * softplus(dt + dt_bias));  state += key outer (beta * (value - key @ state));
    y = query @ state.

    query, key: [num_tokens, num_key_heads, key_dim]; value: [num_tokens, num_heads, head_dim], whose head h reads key
    head h // (num_heads / num_key_heads); dt: [num_tokens, num_heads] or [num_tokens, num_heads, key_dim]; beta:
    [num_tokens, num_heads]; a_log: float32 [num_heads]; dt_bias: float32 [num_heads] or [num_heads * key_dim].
    state: float32 [num_slots, num_heads, key_dim, head_dim]. query_start_loc, from_slots, to_slots: as in
    `causal_conv`. max_query_len: an upper bound, 0 if unknown.
    In float32 at least. Mutates state; returns (y of value's shape and dtype, state or its successor).
    """
    import torch
    import torch.nn.functional as F

    wide = torch.promote_types(value.dtype, torch.float32)
    num_heads, key_dim = value.shape[1], key.shape[2]

    def unit(x: "torch.Tensor") -> "torch.Tensor":
        x = x.to(wide)
        return (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(
            num_heads // x.shape[1], 1
        )

    q, k = unit(query) * key_dim**-0.5, unit(key)
    v, rate = value.to(wide), beta_scale * beta.to(wide).sigmoid()
    steps = dt.to(wide).view(len(value), num_heads, -1)  # [num_tokens, num_heads, 1 or key_dim]
    decay = torch.exp(-a_log.exp()[:, None] * F.softplus(steps + dt_bias.view(num_heads, -1)))[..., None]
    current, y = _before(state, from_slots, query_start_loc, len(v), max_query_len), torch.empty_like(v)
    for requests, tokens in _in_step(query_start_loc, max_query_len):
        decayed = current[requests] * decay[tokens]
        known = (decayed * k[tokens][..., None]).sum(-2)
        news = (v[tokens] - known) * rate[tokens][..., None]
        current[requests] = decayed + k[tokens][..., None] * news[:, :, None]
        y[tokens] = (current[requests] * q[tokens][..., None]).sum(-2)
        _keep(state, current[requests], to_slots[tokens])
    return y.to(value.dtype), state


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
    """The weighted mean of values in RWKV-4 (Peng et al. 2023, eq. 14), for each channel by itself.

    y is the mean of this token's value, weighted by exp(bonus + key), and of those before it; those of the token
    that stands t tokens before the last one are weighted by exp(key - t * exp(a_log)).

    key, value: [num_tokens, n]; a_log, bonus: float32 [n]. state: float32 [num_slots, 3, n], the sum of weighted
    values, that of weights, both divided by exp(top), and top, the largest exponent in them; a sum of 0 has none.
    query_start_loc, from_slots, to_slots: as in `causal_conv`. max_query_len: an upper bound, 0 if unknown.
    In float32 at least. Mutates state; returns (y of value's shape and dtype, state or its successor).
    """
    import torch

    wide = torch.promote_types(value.dtype, torch.float32)
    keys, values, rate = key.to(wide), value.to(wide), a_log.to(wide).exp()
    current, y = _before(state, from_slots, query_start_loc, len(values), max_query_len), torch.empty_like(values)
    current = current.to(wide)

    def join(top: "torch.Tensor", held: "torch.Tensor", new: "torch.Tensor", v: "torch.Tensor") -> "torch.Tensor":
        """Sums that are divided by exp(top), and a value of weight exp(new): [m, 3, n]."""
        most = torch.maximum(top, new)
        old, now = torch.exp(top - most), torch.exp(new - most)
        return torch.stack([old * held[:, 0] + now * v, old * held[:, 1] + now, most], 1)

    for requests, tokens in _in_step(query_start_loc, max_query_len):
        held, k, v = current[requests], keys[tokens], values[tokens]
        top = held[:, 2].masked_fill(held[:, 1] == 0, -torch.inf)
        mean = join(top, held, k + bonus, v)
        y[tokens] = mean[:, 0] / mean[:, 1]
        current[requests] = join(top - rate, held, k, v)
        _keep(state, current[requests], to_slots[tokens])
    return y.to(value.dtype), state


def _owners(query_start_loc: "torch.Tensor", num_tokens: int) -> "torch.Tensor":
    """The request of each token; padding belongs to the last one."""
    import torch

    places = torch.arange(num_tokens, device=query_start_loc.device)
    owners = torch.searchsorted(query_start_loc[1:].contiguous(), places.to(query_start_loc.dtype), right=True)
    return owners.clamp(max=len(query_start_loc) - 2)


def _load(state: "torch.Tensor", from_slots: "torch.Tensor") -> "torch.Tensor":
    """A copy of the states before each row: [num_reqs, *shape]."""
    slots = from_slots[:, 0].long()
    return state[slots.clamp(min=0)].masked_fill(slots.view(-1, *(1,) * (state.dim() - 1)) < 0, 0)


def _before(
    state: "torch.Tensor", from_slots: "torch.Tensor", query_start_loc: "torch.Tensor", num_tokens: int, most: int
) -> "torch.Tensor":
    """The states that the recurrences begin with, as `_in_step` counts them: of each request, or of each token."""
    states = _load(state, from_slots)
    return states[_owners(query_start_loc, num_tokens)] if most == 1 else states


def _keep(state: "torch.Tensor", values: "torch.Tensor", to_slots: "torch.Tensor") -> None:
    """Write the states that have a slot; others land in the null block."""
    state[to_slots.long().clamp(min=0)] = values.to(state.dtype)


def _in_step(query_start_loc: "torch.Tensor", max_query_len: int) -> Iterator[tuple[Any, Any]]:
    """The first tokens of all requests, then the second ones, ...: (requests that have one, their tokens).

    Where no request has more than one, all tokens in order, each with a state of its own.
    """
    if max_query_len == 1:
        yield slice(None), slice(None)
        return
    starts = query_start_loc.long()
    counts = starts.diff()
    for place in range(int(counts.max()) if len(counts) else 0):
        requests = (counts > place).nonzero().flatten()
        yield requests, starts[requests] + place
