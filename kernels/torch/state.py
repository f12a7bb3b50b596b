"""Recurrences in plain torch operations of static shapes, no value read on the host.

The tokens of a step are one sequence in which a request's first token forgets what stands before it. States after all
tokens come of log2(tokens) rounds, each of which joins two runs of the same length (Hillis and Steele 1986).
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

TILE_VALUES = 1 << 26
"""Numbers of the states after all tokens that are held at a time; heads are taken in tiles."""


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    query_start_loc: torch.Tensor,
    from_slots: torch.Tensor,
    to_slots: torch.Tensor,
    *,
    activate: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the declaration in core/ops/state.py says. activate: the activation, of float32."""
    wide, width = torch.promote_types(x.dtype, torch.float32), weight.shape[-1]
    owners, places = _owners(query_start_loc, len(x))
    before = _load(state, from_slots)[owners]
    y, windows = torch.zeros(x.shape, dtype=wide, device=x.device), []
    for back in range(width - 1, -1, -1):
        inputs = torch.roll(x, back, 0)
        if back:
            index = (width - 1 - back + places).clamp(0, width - 2)
            older = before.gather(1, index[:, None, None].expand(-1, 1, x.shape[1]))[:, 0]
            inputs = torch.where((places < back)[:, None], older.to(x.dtype), inputs)
        y = y + inputs.to(wide) * weight[:, 0, width - 1 - back]
        windows.append(inputs)
    _keep(state, torch.stack(windows, 1)[:, 1:], to_slots)
    return activate(y if bias is None else y + bias).to(x.dtype), state


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    a_log: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    query_start_loc: torch.Tensor,
    from_slots: torch.Tensor,
    to_slots: torch.Tensor,
    *,
    dt_min: float = 0.0,
    dt_max: float = float("inf"),
    max_query_len: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the declaration in core/ops/state.py says."""
    wide, num_heads = torch.promote_types(x.dtype, torch.float32), x.shape[1]
    most = max_query_len or len(x)
    step = F.softplus(dt.to(wide) + dt_bias).clamp(dt_min, dt_max)[..., None]
    decay = torch.exp(-step * a_log.exp().view(num_heads, -1))[:, :, None]  # [num_tokens, num_heads, 1, 1 or n]
    inputs = x.to(wide) * step
    b, c = (array.to(wide).repeat_interleave(num_heads // array.shape[1], 1) for array in (b, c))
    owners, places = _owners(query_start_loc, len(x))
    is_first, parts = (places == 0)[:, None, None, None], []
    for heads in _tiles(num_heads, len(x) * state[0, 0].numel()):
        before = _load(state[:, heads], from_slots)[owners]
        values, factors = inputs[:, heads, :, None] * b[:, heads, None], decay[:, heads]
        values = torch.where(is_first, values + factors * before, values)
        factors = torch.where(is_first, 0.0, factors)
        for size in _runs(most):
            values = torch.cat([values[:size], values[size:] + factors[size:] * values[:-size]])
            factors = torch.cat([factors[:size], factors[size:] * factors[:-size]])
        parts.append((values * c[:, heads, None]).sum(-1))
        _keep(state, values, to_slots, heads)
    return (torch.cat(parts, 1) + x.to(wide) * d[:, None]).to(x.dtype), state


def gated_delta(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dt: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    query_start_loc: torch.Tensor,
    from_slots: torch.Tensor,
    to_slots: torch.Tensor,
    *,
    beta_scale: float = 1.0,
    max_query_len: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the declaration in core/ops/state.py says. What a token does to a state is a matrix and an addend:
    (1 - rate * key outer key) * decay, and rate * key outer value."""
    wide, num_heads, key_dim = torch.promote_types(value.dtype, torch.float32), value.shape[1], key.shape[2]
    most = max_query_len or len(value)

    def unit(x: torch.Tensor) -> torch.Tensor:
        x = x.to(wide)
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
        return x.repeat_interleave(num_heads // x.shape[1], 1)[..., None]

    q, k, v = unit(query) * key_dim**-0.5, unit(key), value.to(wide)[:, :, None]
    rate = (beta_scale * beta.to(wide).sigmoid())[..., None, None]
    steps = dt.to(wide).reshape(len(value), num_heads, -1) + dt_bias.view(num_heads, -1)
    decay = torch.exp(-a_log.exp()[:, None] * F.softplus(steps)).expand(-1, -1, key_dim)
    owners, places = _owners(query_start_loc, len(value))
    is_first, parts = (places == 0)[:, None, None, None], []
    one = torch.eye(key_dim, dtype=wide, device=value.device)
    for heads in _tiles(num_heads, len(value) * key_dim * (key_dim + value.shape[2])):
        before = _load(state[:, heads], from_slots)[owners]
        matrices = (one - rate[:, heads] * k[:, heads] * k[:, heads].mT) * decay[:, heads, None]
        values = rate[:, heads] * k[:, heads] * v[:, heads]
        values = torch.where(is_first, values + matrices @ before, values)
        matrices = torch.where(is_first, 0.0, matrices)
        for size in _runs(most):
            values = torch.cat([values[:size], values[size:] + matrices[size:] @ values[:-size]])
            matrices = torch.cat([matrices[:size], matrices[size:] @ matrices[:-size]])
        parts.append((values * q[:, heads]).sum(-2))
        _keep(state, values, to_slots, heads)
    return torch.cat(parts, 1).to(value.dtype), state


def wkv(
    key: torch.Tensor,
    value: torch.Tensor,
    a_log: torch.Tensor,
    bonus: torch.Tensor,
    state: torch.Tensor,
    query_start_loc: torch.Tensor,
    from_slots: torch.Tensor,
    to_slots: torch.Tensor,
    *,
    max_query_len: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the declaration in core/ops/state.py says. What a token does to sums is to divide them by exp(rate), and to
    add its own; exponents of requests before are minus infinity."""
    wide = torch.promote_types(value.dtype, torch.float32)
    most, (owners, places) = max_query_len or len(value), _owners(query_start_loc, len(value))
    is_first, parts = (places == 0)[:, None], []

    def join(earlier: tuple[torch.Tensor, ...], later: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Two runs as (weighted values, weights, top) behind both: the first one faded already."""
        top = torch.maximum(earlier[2], later[2])
        old, now = torch.exp(earlier[2] - top), torch.exp(later[2] - top)
        return old * earlier[0] + now * later[0], old * earlier[1] + now * later[1], top

    for part in _tiles(value.shape[1], len(value) * 3):
        k, v, own_bonus, rate = (
            key[:, part].to(wide),
            value[:, part].to(wide),
            bonus[part],
            a_log[part].to(wide).exp(),
        )
        before = _load(state[:, :, part], from_slots).to(wide)[owners].unbind(1)
        before = (*before[:2], before[2].masked_fill(before[1] == 0, -torch.inf))
        one = torch.ones_like(k)
        entered = join((*before[:2], before[2] - rate), (v, one, k))
        run = tuple(torch.where(is_first, a, b) for a, b in zip(entered, (v, one, k), strict=True))
        fade = torch.where(is_first, -torch.inf, -rate.expand_as(k))
        for size in _runs(most):
            earlier = (run[0][:-size], run[1][:-size], run[2][:-size] + fade[size:])
            joined = join(earlier, tuple(x[size:] for x in run))
            run = tuple(torch.cat([x[:size], y]) for x, y in zip(run, joined, strict=True))
            fade = torch.cat([fade[:size], fade[size:] + fade[:-size]])
        behind = tuple(torch.where(is_first, a, torch.roll(b, 1, 0)) for a, b in zip(before, run, strict=True))
        total, weights, _ = join(behind, (v, one, k + own_bonus))
        parts.append(total / weights)
        _keep(state, torch.stack(run, 1), to_slots, part, axis=2)
    return torch.cat(parts, 1).to(value.dtype), state


def _runs(most: int) -> Iterator[int]:
    """Lengths of the runs that are joined until one is as long as the longest request."""
    size = 1
    while size < most:
        yield size
        size *= 2


def _tiles(num_heads: int, head_values: int) -> Iterator[slice]:
    """Heads by so many that their states fit."""
    size = max(1, TILE_VALUES // max(1, head_values))
    return (slice(start, min(start + size, num_heads)) for start in range(0, num_heads, size))


def _owners(query_start_loc: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The request of each token, the last one's for padding, and the token's place in it."""
    tokens = torch.arange(num_tokens, dtype=query_start_loc.dtype, device=query_start_loc.device)
    owners = (tokens[:, None] >= query_start_loc[None, 1:]).sum(1).clamp(max=len(query_start_loc) - 2)
    return owners, (tokens - query_start_loc[owners]).long()


def _load(state: torch.Tensor, from_slots: torch.Tensor) -> torch.Tensor:
    """The states before each row: [num_reqs, *shape]."""
    slots = from_slots[:, 0].long()
    is_new = (slots < 0).view(-1, *(1,) * (state.dim() - 1))
    return state[slots.clamp(min=0)].masked_fill(is_new, 0)


def _keep(
    state: torch.Tensor, values: torch.Tensor, to_slots: torch.Tensor, part: slice = slice(None), *, axis: int = 1
) -> None:
    """Write the states that have a slot; others land in the null block. part: of this axis, what values have.

    No view is written to, which some recorders of steps cannot hold.
    """
    slots, size = to_slots.long().clamp(min=0), state.shape[axis] if state.dim() > axis else 0
    if len(range(size)[part]) == size:
        state[slots] = values.to(state.dtype)
        return
    places = [range(n) for n in state.shape[1:axis]] + [range(size)[part]]
    indices = [slots, *(torch.arange(p.start, p.stop, device=state.device) for p in places)]
    grid = tuple(index.view(-1, *(1,) * (axis - n)) for n, index in enumerate(indices))
    state[grid] = values.to(state.dtype)
