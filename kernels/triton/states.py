"""Recurrences over the tokens of a request: a program owns a part of one request's state and walks over its tokens.

Sums have the order of the tokens, in prompts, chunks and single steps, so that a state has the same bits however a
request is cut. A state stays in registers from a program's first token to its last; what each token leaves is written
where it has a slot. Requests, heads and parts of heads run side by side: none reads a slot that another one writes.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from .elementwise import activate, sigmoid, softplus


@triton.jit
def opened(starts_ptr, from_ptr, from_stride):
    """Of the request of this program: its first token, how many it has, and the slot of the state before them, which
    is negative where there is none."""
    request = tl.program_id(0)
    first = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - first
    return first.to(tl.int64), count, tl.load(from_ptr + request * from_stride).to(tl.int64)


@triton.jit(do_not_specialize=["from_stride"])
def history_kernel(state_ptr, from_ptr, out_ptr, from_stride, n, BLOCK: tl.constexpr):
    """out[r] = state[from[r]], rows of n values; zeros where from[r] is negative."""
    request = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(from_ptr + request * from_stride).to(tl.int64)
    x = tl.load(state_ptr + slot * n + col, mask=(col < n) & (slot >= 0), other=0.0)
    tl.store(out_ptr + request.to(tl.int64) * n + col, x, mask=col < n)


@triton.jit(do_not_specialize=["num_reqs"])
def conv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    history_ptr,
    state_ptr,
    starts_ptr,
    to_ptr,
    out_ptr,
    num_reqs,
    x_stride,
    n,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
):
    """A token's channels: a sum over its last WIDTH inputs, of which those before this step come from `history`,
    [num_reqs, WIDTH - 1, n]; the last WIDTH - 1 of them are its state. ACTIVATION: "" for none."""
    token = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_col = col < n
    # The last request that begins at or before the token.
    request = 0
    high = num_reqs
    while high - request > 1:
        middle = (request + high) // 2
        if tl.load(starts_ptr + middle) <= token:
            request = middle
        else:
            high = middle
    place = token - tl.load(starts_ptr + request)
    slot = tl.load(to_ptr + token).to(tl.int64)
    row = x_ptr + token.to(tl.int64) * x_stride + col
    y = tl.zeros([BLOCK], tl.float32)
    for step in tl.static_range(WIDTH):
        back = WIDTH - 1 - step
        is_new = place >= back
        new = tl.load(row - back * x_stride, mask=is_col & is_new, other=0.0)
        index = (WIDTH - 1) * request + tl.minimum(place + step, WIDTH - 2)
        old = tl.load(history_ptr + index.to(tl.int64) * n + col, mask=is_col & (place < back), other=0.0)
        value = tl.where(is_new, new, old)
        y += value.to(tl.float32) * tl.load(weight_ptr + col * WIDTH + step, mask=is_col, other=0.0)
        if step > 0:
            tl.store(state_ptr + (slot * (WIDTH - 1) + step - 1) * n + col, value, mask=is_col & (slot >= 0))
    if BIAS:
        y += tl.load(bias_ptr + col, mask=is_col, other=0.0)
    if ACTIVATION != "":
        y = activate(y, ACTIVATION)
    tl.store(out_ptr + token.to(tl.int64) * n + col, y.to(out_ptr.dtype.element_ty), mask=is_col)


@triton.jit(do_not_specialize=["from_stride"])
def scan_kernel(
    x_ptr,
    dt_ptr,
    b_ptr,
    c_ptr,
    a_log_ptr,
    d_ptr,
    dt_bias_ptr,
    state_ptr,
    starts_ptr,
    from_ptr,
    to_ptr,
    out_ptr,
    from_stride,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    dt_min,
    dt_max,
    NUM_VALUES: tl.constexpr,
    GROUP_VALUES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    VALUES: tl.constexpr,
    MATRIX: tl.constexpr,
):
    """The selective state space for VALUES of the NUM_VALUES values of all heads, each with STATE numbers; b and c
    belong to GROUP_VALUES of them. MATRIX: a decay for each number of a head's state, else one for the head."""
    blocks = (GROUP_VALUES + VALUES - 1) // VALUES
    group = tl.program_id(1) // blocks
    inside = tl.program_id(1) % blocks * VALUES + tl.arange(0, VALUES)
    is_value = inside < GROUP_VALUES
    value = group * GROUP_VALUES + inside
    head = value // HEAD_DIM
    n = tl.arange(0, STATE_BLOCK)
    is_n = n < STATE
    is_cell = is_value[:, None] & is_n[None, :]
    cell = value[:, None] * STATE + n[None, :]
    first, count, slot = opened(starts_ptr, from_ptr, from_stride)
    if count < 1:
        return
    size: tl.constexpr = NUM_VALUES * STATE
    state = tl.load(state_ptr + slot * size + cell, mask=is_cell & (slot >= 0), other=0.0).to(tl.float32)
    if MATRIX:
        rate = tl.load(a_log_ptr + head[:, None] * STATE + n[None, :], mask=is_cell, other=0.0)
    else:
        rate = tl.load(a_log_ptr + head, mask=is_value, other=0.0)[:, None]
    rate = tl.exp(rate.to(tl.float32))
    bias = tl.load(dt_bias_ptr + head, mask=is_value, other=0.0)
    own = tl.load(d_ptr + head, mask=is_value, other=0.0)
    for place in range(0, count):
        token = first + place
        x = tl.load(x_ptr + token * x_stride + value, mask=is_value, other=0.0).to(tl.float32)
        step = tl.load(dt_ptr + token * dt_stride + head, mask=is_value, other=0.0).to(tl.float32)
        step = tl.minimum(tl.maximum(softplus(step + bias), dt_min), dt_max)
        b = tl.load(b_ptr + token * b_stride + group * STATE + n, mask=is_n, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + token * c_stride + group * STATE + n, mask=is_n, other=0.0).to(tl.float32)
        state = state * tl.exp(-step[:, None] * rate) + (x * step)[:, None] * b[None, :]
        y = tl.sum(state * c[None, :], 1) + x * own
        tl.store(out_ptr + token * NUM_VALUES + value, y.to(out_ptr.dtype.element_ty), mask=is_value)
        kept = tl.load(to_ptr + token).to(tl.int64)
        tl.store(state_ptr + kept * size + cell, state.to(state_ptr.dtype.element_ty), mask=is_cell & (kept >= 0))


@triton.jit(do_not_specialize=["from_stride"])
def delta_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    dt_ptr,
    beta_ptr,
    a_log_ptr,
    dt_bias_ptr,
    state_ptr,
    starts_ptr,
    from_ptr,
    to_ptr,
    out_ptr,
    from_stride,
    query_stride,
    key_stride,
    value_stride,
    dt_stride,
    beta_stride,
    beta_scale,
    query_scale,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUES: tl.constexpr,
    BY_KEY: tl.constexpr,
):
    """The gated delta rule for VALUES of a head's HEAD_DIM values. GROUP: heads that share a key head. BY_KEY: a
    decay for each value of a key, else one for the head."""
    head = tl.program_id(1)
    col = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_col = col < HEAD_DIM
    k = tl.arange(0, KEY_BLOCK)
    is_key = k < KEY_DIM
    is_cell = is_key[:, None] & is_col[None, :]
    cell = (head * KEY_DIM + k)[:, None] * HEAD_DIM + col[None, :]
    first, count, slot = opened(starts_ptr, from_ptr, from_stride)
    if count < 1:
        return
    size: tl.constexpr = NUM_HEADS * KEY_DIM * HEAD_DIM
    state = tl.load(state_ptr + slot * size + cell, mask=is_cell & (slot >= 0), other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    own_key = head // GROUP * KEY_DIM + k
    for place in range(0, count):
        token = first + place
        q = tl.load(query_ptr + token * query_stride + own_key, mask=is_key, other=0.0).to(tl.float32)
        q *= query_scale / tl.sqrt(tl.sum(q * q, 0) + 1e-6)
        key = tl.load(key_ptr + token * key_stride + own_key, mask=is_key, other=0.0).to(tl.float32)
        key *= 1.0 / tl.sqrt(tl.sum(key * key, 0) + 1e-6)
        value = tl.load(value_ptr + token * value_stride + head * HEAD_DIM + col, mask=is_col, other=0.0)
        beta = beta_scale * sigmoid(tl.load(beta_ptr + token * beta_stride + head).to(tl.float32))
        if BY_KEY:
            of_key = head * KEY_DIM + k
            step = tl.load(dt_ptr + token * dt_stride + of_key, mask=is_key, other=0.0).to(tl.float32)
            step += tl.load(dt_bias_ptr + of_key, mask=is_key, other=0.0)
            state *= tl.exp(-rate * softplus(step))[:, None]
        else:
            step = tl.load(dt_ptr + token * dt_stride + head).to(tl.float32) + tl.load(dt_bias_ptr + head)
            state *= tl.exp(-rate * softplus(step))
        known = tl.sum(state * key[:, None], 0)
        news = (value.to(tl.float32) - known) * beta
        state += key[:, None] * news[None, :]
        y = tl.sum(state * q[:, None], 0)
        place_of = (token * NUM_HEADS + head) * HEAD_DIM + col
        tl.store(out_ptr + place_of, y.to(out_ptr.dtype.element_ty), mask=is_col)
        kept = tl.load(to_ptr + token).to(tl.int64)
        tl.store(state_ptr + kept * size + cell, state.to(state_ptr.dtype.element_ty), mask=is_cell & (kept >= 0))


@triton.jit(do_not_specialize=["from_stride"])
def wkv_kernel(
    key_ptr,
    value_ptr,
    a_log_ptr,
    bonus_ptr,
    state_ptr,
    starts_ptr,
    from_ptr,
    to_ptr,
    out_ptr,
    from_stride,
    key_stride,
    value_stride,
    n,
    BLOCK: tl.constexpr,
):
    """RWKV-4's weighted means of BLOCK channels: sums of weighted values and of weights, divided by exp(top)."""
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_col = col < n
    first, count, slot = opened(starts_ptr, from_ptr, from_stride)
    if count < 1:
        return
    cell = state_ptr + slot * 3 * n + col
    is_old = is_col & (slot >= 0)
    total = tl.load(cell, mask=is_old, other=0.0).to(tl.float32)
    weights = tl.load(cell + n, mask=is_old, other=0.0).to(tl.float32)
    top = tl.load(cell + 2 * n, mask=is_old, other=0.0).to(tl.float32)
    top = tl.where(weights == 0.0, float("-inf"), top)
    rate = tl.exp(tl.load(a_log_ptr + col, mask=is_col, other=0.0).to(tl.float32))
    bonus = tl.load(bonus_ptr + col, mask=is_col, other=0.0).to(tl.float32)
    for place in range(0, count):
        token = first + place
        key = tl.load(key_ptr + token * key_stride + col, mask=is_col, other=0.0).to(tl.float32)
        value = tl.load(value_ptr + token * value_stride + col, mask=is_col, other=0.0).to(tl.float32)
        most = tl.maximum(top, key + bonus)
        old = tl.exp(top - most)
        now = tl.exp(key + bonus - most)
        y = (old * total + now * value) / (old * weights + now)
        tl.store(out_ptr + token * n + col, y.to(out_ptr.dtype.element_ty), mask=is_col)
        most = tl.maximum(top - rate, key)
        old = tl.exp(top - rate - most)
        now = tl.exp(key - most)
        total = old * total + now * value
        weights = old * weights + now
        top = most
        kept = tl.load(to_ptr + token).to(tl.int64)
        is_kept = is_col & (kept >= 0)
        cell = state_ptr + kept * 3 * n + col
        tl.store(cell, total.to(state_ptr.dtype.element_ty), mask=is_kept)
        tl.store(cell + n, weights.to(state_ptr.dtype.element_ty), mask=is_kept)
        tl.store(cell + 2 * n, top.to(state_ptr.dtype.element_ty), mask=is_kept)
