"""From logits to a token: the Gumbel maximum over the vocabulary, in chunks, then over the chunks' winners."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl


@triton.jit
def mix(x):
    """The bit mixer of core/ops/sampling.py on uint32, which wraps."""
    x = (x ^ (x >> 16)) * tl.full([], 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full([], 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def gumbel(h):
    """-log(-log1p(-v)) with v = (h + 0.5) / 2^32 rounded once to float32, at most 1 - 2^-24.

    No float64: the high 24 bits and the low 8 with their half are exact, so their sum is rounded once. Small v, which
    win, take the series of log1p.
    """
    high = (h >> 8).to(tl.float32) * 5.9604644775390625e-08
    low = ((h & 255).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    v = tl.minimum(high + low, 1.0 - 5.9604644775390625e-08)
    series = v * (1.0 + v * (0.5 + v * (0.3333333333333333 + v * (0.25 + v * 0.2))))
    rate = tl.where(v < 0.0078125, series, -tl.log(1.0 - v))
    return -tl.log(rate)


@triton.jit
def winner_kernel(
    logits_ptr,
    seed_ptr,
    position_ptr,
    temperature_ptr,
    value_ptr,
    token_ptr,
    stride_row,
    vocab_size,
    BLOCK: tl.constexpr,
    NOISE: tl.constexpr,
):
    """The best token of one chunk of one row: its value and its id; of equal ones the lowest id.

    NOISE: logits / temperature + Gumbel noise, but rows with a temperature below 1e-5 stay greedy.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = token < vocab_size
    x = tl.load(logits_ptr + row * stride_row + token, mask=mask, other=float("-inf"))
    if NOISE:
        temperature = tl.load(temperature_ptr + row)
        if temperature >= 1e-5:
            seed = tl.load(seed_ptr + row).to(tl.uint32, bitcast=True)
            position = tl.load(position_ptr + row).to(tl.uint32, bitcast=True)
            key = mix(mix(seed) ^ position)
            h = mix(key + (token + 1).to(tl.uint32) * tl.full([], 0x9E3779B9, tl.uint32))
            x = tl.where(mask, x / temperature + gumbel(h), float("-inf"))
    best = tl.max(x, 0)
    found = tl.min(tl.where((x == best) & mask, token, vocab_size), 0)
    cell = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(value_ptr + cell, best)
    tl.store(token_ptr + cell, found)


@triton.jit
def best_kernel(value_ptr, token_ptr, out_ptr, num_chunks, vocab_size, BLOCK: tl.constexpr):
    """The best of a row's chunks, the lowest id of equal ones; a row of -inf or NaN gives a token all the same."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    mask = chunk < num_chunks
    value = tl.load(value_ptr + row * num_chunks + chunk, mask=mask, other=float("-inf"))
    token = tl.load(token_ptr + row * num_chunks + chunk, mask=mask, other=vocab_size)
    best = tl.max(value, 0)
    found = tl.min(tl.where(value == best, token, vocab_size), 0)
    tl.store(out_ptr + row, tl.where(found < vocab_size, found, 0))
