"""Cases of the ops between logits and tokens: masks, biases, penalties, draws and their probabilities."""

from collections.abc import Iterator

import numpy as np

from .values import ROWS, Case, Rng, Value, normal32, whole


def apply_token_mask(rng: Rng) -> Iterator[Case]:
    """Words that are full, cut short and many."""
    for rows in ROWS[1:]:
        for vocab_size in (31, 32, 1000):
            words = rng.integers(-(2**31), 2**31, (rows, -(-vocab_size // 32)))
            yield Case(f"[{rows}, {vocab_size}]", [normal32(rng, rows, vocab_size), whole(words)])


def add_logit_bias(rng: Rng) -> Iterator[Case]:
    """Sums, bans, both on one token, nothing."""
    values = Value("float32", np.array([2.5, -np.inf, -1.0, 0.5], np.float32))
    yield Case("bias and ban", [normal32(rng, 3, 97), whole([0, 0, 2, 2]), whole([96, 3, 0, 1]), values])
    twice = Value("float32", np.array([1.5, 2.0, 0.5, -np.inf], np.float32))
    yield Case("two of one token", [normal32(rng, 2, 97), whole([1, 1, 0, 0]), whole([7, 7, 96, 96]), twice])
    rows, tokens = rng.integers(0, 3, 600), rng.permutation(600)
    many = [whole(rows), whole(tokens), Value("float32", rng.standard_normal(600).astype(np.float32))]
    yield Case("600 tokens", [normal32(rng, 3, 601), *many])
    none = [whole([]), whole([]), Value("float32", np.zeros(0, np.float32))]
    yield Case("nothing", [normal32(rng, 3, 97), *none])


def apply_penalties(rng: Rng) -> Iterator[Case]:
    """Strengths on either side of what changes nothing, and padding."""
    strengths = [np.array(values, np.float32) for values in ([1.3, 1.0, 0.8], [0.5, -0.5, 0.0], [0.2, 0.0, -1.0])]
    few = [0, 0, 1, 2, 2], [5, 96, 0, 5, 6], [0, 3, 1, 2, 0]
    mixed = rng.permutation(97)
    many = np.repeat([0, 2, -1], 30), np.concatenate([mixed[:30], mixed[20:50], mixed[50:80]]), rng.integers(0, 4, 90)
    for what, (rows, tokens, counts) in (
        ("three rows", few),
        ("padding, and a row without any", many),
        ("nothing", ([], [], [])),
    ):
        args = [normal32(rng, 3, 97), *map(whole, (rows, tokens, counts)), *(Value("float32", s) for s in strengths)]
        yield Case(what, args)
    # A long text: thousands of tokens, some of them used hundreds of times; banned ones stay banned.
    logits = rng.standard_normal((3, 1500)).astype(np.float32)
    logits[:, ::7] = -np.inf
    used = [np.repeat([0, 2], 1500), np.tile(np.arange(1500), 2), rng.integers(0, 700, 3000)]
    strengths = [np.array(values, np.float32) for values in ([1.1, 1.0, 0.9], [0.01, 0.0, -0.02], [0.5, 0.0, 0.1])]
    args = [Value("float32", logits), *map(whole, used), *(Value("float32", s) for s in strengths)]
    yield Case("a long text under bans", args)


def logprobs(rng: Rng) -> Iterator[Case]:
    """No, one and many alternatives, and equal logits, which share a rank."""
    for rows in ROWS:
        for num_logprobs in (0, 1, 20):
            args = [normal32(rng, rows, 301), whole(rng.integers(0, 301, rows))]
            yield Case(f"[{rows}, 301] top {num_logprobs}", args, {"num_logprobs": num_logprobs})
    levels = Value("float32", rng.integers(-2, 3, (9, 301)).astype(np.float32))
    yield Case("equal logits", [levels, whole(rng.integers(0, 301, 9))], {"num_logprobs": 0})
    large = Value("float32", rng.permutation(301 * 9).reshape(9, 301).astype(np.float32) * 2 - 2000)
    yield Case("logits up to 3000", [large, whole(rng.integers(0, 301, 9))], {"num_logprobs": 5})
    banned = rng.standard_normal((5, 301)).astype(np.float32)
    banned[:, ::2] = -np.inf
    args = [Value("float32", banned), whole([0, 1, 2, 3, 300])]
    yield Case("banned tokens", args, {"num_logprobs": 20})
    wide = rng.permutation(3 * 70_001).reshape(3, 70_001).astype(np.float32) / 7000
    lowest = np.array([wide[0].argmin(), wide[1].argmax(), 70_000])
    yield Case("70001 tokens", [Value("float32", wide), whole(lowest)], {"num_logprobs": 20})


def sample(rng: Rng) -> Iterator[Case]:
    """Every limit by itself and all together, equal tokens, bans, and a vocabulary of several chunks."""
    rows, vocab_size = 40, 1009
    logits = rng.standard_normal((rows, vocab_size)).astype(np.float32) * 3
    logits[0] = 0.0  # all equal: the lowest token id wins
    base = [Value("float32", logits), whole(rng.integers(-(2**31), 2**31, rows)), whole(np.arange(rows) * 37)]
    warm = np.linspace(0, 2, rows, dtype=np.float32)
    top_k = np.array([0, 1, 5, vocab_size] * 10)
    top_p = np.tile(np.array([1.0, 0.9, 0.5, 0.01], np.float32), 10)
    min_p = np.tile(np.array([0.0, 0.05, 0.5, 1.0], np.float32), 10)
    yield Case("greedy", [*base, None, None, None, None], exact_inputs=True)
    yield Case("temperature", [*base, Value("float32", warm), None, None, None], exact_inputs=True)
    for name, arguments in (
        ("top_k", [whole(top_k), None, None]),
        ("top_p", [None, Value("float32", top_p), None]),
        ("min_p", [None, None, Value("float32", min_p)]),
        ("all", [whole(top_k), Value("float32", top_p[::-1].copy()), Value("float32", min_p)]),
    ):
        yield Case(name, [*base, Value("float32", warm), *arguments], exact_inputs=True)
    wide = rng.standard_normal((6, 5003)).astype(np.float32)
    wide[0, [4095, 4096, 5002]] = 9.0
    wide[1, 5002] = 9.0
    wide[2:4, :-1] = -np.inf  # all but the last are banned
    wide[4, ::2] = -np.inf
    draws = [Value("float32", wide), *(whole(rng.integers(-(2**31), 2**31, 6)) for _ in range(2))]
    warmth = Value("float32", np.array([0, 1, 0, 1, 1, 0.7], np.float32))
    yield Case("greedy over chunks", [*draws, None, None, None, None], exact_inputs=True)
    yield Case("draws over chunks", [*draws, warmth, None, None, None], exact_inputs=True)
    limits_of_rows = [
        whole([0, 5, 0, 1, 2000, 40]),
        Value("float32", np.array([0.3, 1.0, 0.9, 1.0, 0.8, 0.95], np.float32)),
        Value("float32", np.array([0.0, 0.0, 0.1, 0.0, 0.02, 0.0], np.float32)),
    ]
    hot = Value("float32", np.array([1.5, 1, 0.7, 1, 1, 2.0], np.float32))
    yield Case("limits over chunks", [*draws, hot, *limits_of_rows], exact_inputs=True)
    # Few different values: which of equal tokens are kept is decided by their order. Probabilities are whole 1/64ths,
    # so that sums are exact in any order.
    tied = np.log(np.array([16, 16, 8, 8, 8, 2, 2, 1, 1, 1, 1], np.float32))
    ties = [Value("float32", np.tile(tied, (rows, 1))), *base[1:], Value("float32", np.ones(rows, np.float32))]
    limits = np.tile(np.array([0.2, 0.3, 0.4, 0.6, 0.7], np.float32), 8)
    yield Case("top_k of equal tokens", [*ties, whole([1, 3, 4, 6, 9] * 8), None, None], exact_inputs=True)
    yield Case("top_p of equal tokens", [*ties, None, Value("float32", limits), None], exact_inputs=True)
    even = [Value("float32", np.zeros((rows, 8), np.float32)), *ties[1:]]  # eighths are exact
    edges = np.tile(np.array([0.125, 0.25, 0.5, 0.875], np.float32), 10)
    # What no request should ask for, and some do; logits of which no exponential is a float32.
    far = [Value("float32", rng.standard_normal((rows, 301)).astype(np.float32) * 2 + 500), *base[1:]]
    cold = np.tile(np.array([1e-7, 9e-6, 2e-5, 0.05, 1.0], np.float32), 8)
    for what, given in (("cold", base), ("cold, large logits", far)):
        yield Case(what, [*given, Value("float32", cold), None, None, None], exact_inputs=True)
    odd = [
        whole([vocab_size + 5, 2**31 - 1, 0, 3] * 10),
        Value("float32", np.tile(np.array([0.0, 1.0, 0.9, 0.0, 0.6], np.float32), 8)),
        Value("float32", np.tile(np.array([0.0, 0.0, 1.0, 0.1], np.float32), 10)),
    ]
    yield Case("odd limits", [*base, Value("float32", warm), *odd], exact_inputs=True)
    yield Case("odd limits of large logits", [*far, Value("float32", warm), *odd], exact_inputs=True)
    # What min_p cuts off has no share in what top_p counts.
    split = np.log(np.array([[0.3, 0.2, 0.2, 0.1, 0.1, 0.05, 0.05]], np.float32)).repeat(rows, 0)
    both = [whole([0, 4, 0, 5] * 10), Value("float32", np.full(rows, 0.6, np.float32))]
    both.append(Value("float32", np.tile(np.array([0.5, 0.6], np.float32), 20)))
    yield Case("min_p ahead of top_p", [Value("float32", split), *ties[1:], *both], exact_inputs=True)
    large = rng.standard_normal((2, 70_001)).astype(np.float32)
    large[0, 69_999] = 9.0
    draws = [Value("float32", large), whole([3, 4]), whole([70_000, 131_072])]
    yield Case(
        "70001 tokens", [*draws, Value("float32", np.array([0, 1], np.float32)), None, None, None], exact_inputs=True
    )
    yield Case("top_p where sums end", [*even, None, Value("float32", edges), None], exact_inputs=True)


def recall_tokens(rng: Rng) -> Iterator[Case]:
    """Tokens that are known beside some that a step in flight samples."""
    many = rng.integers(0, 50, 700) * (rng.random(700) < 0.5) - (rng.random(700) < 0.3)
    places = whole(rng.integers(0, 90, 700))
    yield Case("700 tokens", [whole(np.maximum(many, -1)), whole(rng.permutation(90) + 100), places])
    yield Case("mixed", [whole([4, -1, 7, -1]), whole([10, 11, 12]), whole([0, 2, 1, 0])])
