"""From logits to tokens. All in float32; `logits` is [num_rows, vocab_size] float32 throughout.

Noise is stateless: it depends on (seed, position, token) only, so a request draws the same tokens alone, in any
batch and after a preemption.
"""

from collections.abc import Callable

from ..stages import Array


def apply_token_mask(logits: Array, mask: Array) -> Array:
    """Ban tokens whose bit is 0.

    mask: int32 [num_rows, ceil(vocab_size / 32)]; token t is bit t % 32 of word t // 32.
    """
    import torch

    tokens = torch.arange(logits.shape[-1], device=logits.device)
    allowed = (mask[:, tokens // 32] >> (tokens % 32).to(mask.dtype)) & 1
    return logits.masked_fill(allowed == 0, float("-inf"))


def add_logit_bias(logits: Array, rows: Array, tokens: Array, values: Array) -> Array:
    """logits[rows[i], tokens[i]] += values[i]; -inf bans a token. All [num_bias]."""
    return logits.index_put((rows.long(), tokens.long()), values, accumulate=True)


def apply_penalties(
    logits: Array,
    rows: Array,
    tokens: Array,
    counts: Array,
    repetition: Array,
    frequency: Array,
    presence: Array,
) -> Array:
    """Penalise tokens that a request has used (Keskar et al. 2019 for repetition).

    rows, tokens, counts: int32 [num_penalties], one entry for each distinct token of prompt and output of a
    row, counts being its occurrences in the output; a row of -1 is padding. repetition, frequency, presence:
    float32 [num_rows]. A logit is divided by repetition if positive, else multiplied; then frequency * count is
    subtracted, and presence if count > 0.
    """
    import torch
    import torch.nn.functional as F

    # One row more, the last one, is where padding lands.
    logits, repetition = F.pad(logits, (0, 0, 0, 1)), F.pad(repetition, (0, 1), value=1.0)
    frequency, presence = F.pad(frequency, (0, 1)), F.pad(presence, (0, 1))
    rows, tokens = rows.long(), tokens.long()
    value = logits[rows, tokens]
    rep = repetition[rows]
    value = torch.where(value > 0, value / rep, value * rep)
    value = value - frequency[rows] * counts - presence[rows] * (counts > 0)
    return logits.index_put_((rows, tokens), value)[:-1]


def logprobs(logits: Array, token_ids: Array, *, num_logprobs: int) -> tuple[Array, Array, Array, Array]:
    """Log probabilities of chosen and of most likely tokens.

    token_ids: int32 [num_rows]. Returns (chosen float32 [num_rows], ranks int32 [num_rows], top ids int32
    [num_rows, num_logprobs], top values float32 [num_rows, num_logprobs]); rank 1 is the most likely token.
    """
    import torch

    values = logits.log_softmax(-1)
    chosen = values.gather(-1, token_ids.long()[:, None])
    ranks = (values > chosen).sum(-1) + 1
    top_values, top_ids = values.topk(num_logprobs, -1)
    return chosen[:, 0], ranks.to(torch.int32), top_ids.to(torch.int32), top_values


def sample(
    logits: Array,
    seeds: Array,
    positions: Array,
    temperature: Array | None,
    top_k: Array | None,
    top_p: Array | None,
    min_p: Array | None,
) -> Array:
    """One token a row: temperature, min_p, top_k, top_p, then the Gumbel maximum.

    temperature: float32 [num_rows], 0 is greedy, None makes all rows greedy. top_k: int32, 0 keeps all, ties
    with the k-th are kept. top_p: float32, a token is kept if the tokens above it hold less than top_p.
    min_p: float32, a token is kept if its probability is at least min_p times the highest. seeds, positions:
    int32 [num_rows]. Returns int32 [num_rows]. Of equal logits the lowest token id wins.
    """
    return draw(
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        noise=lambda: gumbel_noise(seeds, positions, vocab_size=logits.shape[-1]),
    )


def draw(
    logits: Array,
    temperature: Array | None,
    top_k: Array | None,
    top_p: Array | None,
    min_p: Array | None,
    *,
    noise: Callable[[], Array],
) -> Array:
    """`sample` with noise, float32 [num_rows, vocab_size], from elsewhere; not an op."""
    import torch

    best = logits.argmax(-1).to(torch.int32)
    if temperature is None:
        return best
    scaled = keep_tokens(logits / temperature.clamp(min=1e-5)[:, None], top_k, top_p, min_p)
    return torch.where(temperature < 1e-5, best, (scaled + noise()).argmax(-1).to(torch.int32))


def keep_tokens(scaled: Array, top_k: Array | None, top_p: Array | None, min_p: Array | None) -> Array:
    """Logits over temperature, [num_rows, vocab_size] float32, with -inf for tokens that are not to be drawn.

    min_p, then top_k, then top_p, as `sample` says; a row's most likely token is always kept.
    """
    import torch

    if min_p is not None:
        floor = scaled.amax(-1, keepdim=True) + min_p.log()[:, None]
        scaled = scaled.masked_fill(scaled < floor, float("-inf"))
    if top_k is None and top_p is None:
        return scaled
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    drop = torch.zeros_like(ordered, dtype=torch.bool)
    if top_k is not None:
        kth = ordered.gather(-1, (top_k.long() - 1).clamp(min=0, max=ordered.shape[-1] - 1)[:, None])
        drop = (ordered < kth) & (top_k > 0)[:, None]
        ordered = ordered.masked_fill(drop, float("-inf"))
    if top_p is not None:
        probability = ordered.softmax(-1)
        above = probability.cumsum(-1) - probability
        drop = drop | ((above >= top_p[:, None]) & (top_p < 1)[:, None])
        drop = drop & (torch.arange(drop.shape[-1], device=drop.device) > 0)
    return scaled.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), float("-inf"))


def gumbel_noise(seeds: Array, positions: Array, *, vocab_size: int) -> Array:
    """Gumbel noise from a counter: float32 [num_rows, vocab_size].

    With 32-bit wrapping arithmetic: key = mix(mix(seed) ^ position), h = mix(key + 0x9E3779B9 * (token + 1)),
    v = (h + 0.5) / 2^32 as float32, at most 1 - 2^-24; noise = -log(-log1p(-v)).
    mix(x): x ^= x >> 16; x *= 0x7FEB352D; x ^= x >> 15; x *= 0x846CA68B; x ^= x >> 16 (Wellons 2018).
    """
    import torch

    mask = 0xFFFFFFFF

    def mix(x: Array) -> Array:
        x = (x ^ (x >> 16)) * 0x7FEB352D & mask
        x = (x ^ (x >> 15)) * 0x846CA68B & mask
        return x ^ (x >> 16)

    key = mix(mix(seeds.long() & mask) ^ (positions.long() & mask))
    tokens = torch.arange(1, vocab_size + 1, device=seeds.device, dtype=torch.int64)
    h = mix((key[:, None] + tokens * 0x9E3779B9) & mask)
    v = ((h.to(torch.float64) + 0.5) / 2.0**32).to(torch.float32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-v))
