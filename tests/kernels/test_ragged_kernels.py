"""Attention of whole requests, cross attention and means of rows against float64, and their bits in any batch."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

ops = pytest.importorskip("headrace.kernels.cpu._ops", reason="the kernels are not built: pip install -e .")

Array = npt.NDArray[Any]
BLOCK = 16
DTYPES = ("float32", "bfloat16", "float16")


def random(kit: Any, shape: tuple[int, ...], dtype: str, seed: int) -> Array:
    result: Array = kit.to_dtype(np.random.default_rng((seed, *shape)).standard_normal(shape), dtype)
    return result


def t5_bias(table: Array, distance: Array, both_ways: bool) -> Array:
    """Written after Raffel et al. 2020: [...] distances (key - query) -> [..., num_heads]."""

    def bucket(d: int) -> int:
        n = len(table) // 2 if both_ways else len(table)
        base = n if both_ways and d > 0 else 0
        size = abs(d) if both_ways else max(-d, 0)
        exact = n // 2
        if size < exact:
            return base + size
        far = exact + int(math.log(size / exact) / math.log(128 / exact) * (n - exact) + 1e-9)
        return base + min(far, n - 1)

    return table[np.vectorize(bucket)(distance)].astype(np.float64)


def oracle(
    kit: Any, q: Array, k: Array, v: Array, *, scale: float, window: int = 0, softcap: float = 0.0, bias: Any = None
) -> Array:
    """One request in float64. bias: [queries, keys, heads]."""
    group = q.shape[1] // k.shape[1]
    wide, keys, values = kit.to_float64(q), *(np.repeat(kit.to_float64(a), group, 1) for a in (k, v))
    scores = np.einsum("qhd,khd->hqk", wide, keys, optimize=True) * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.transpose(2, 0, 1)
    distance = np.arange(len(k))[None, :] - np.arange(len(q))[:, None]
    if window:
        scores = np.where(np.abs(distance) >= window, -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    result: Array = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), values, optimize=True)
    return result


def attend(kit: Any, dtype: str, q: Array, k: Array, v: Array, lens: Sequence[int], options: dict[str, Any]) -> Array:
    """All requests in one step of a program, [num_tokens, num_heads, head_dim]."""
    tape = kit.Tape(len(q), dtype)
    views = [tape.load(array) for array in (q, k, v)]
    out = tape.value(q.shape[1] * q.shape[2])
    cache = ops.KVCache(len(q) // BLOCK + len(lens) + 1, BLOCK, *k.shape[1:], dtype)
    filler = kit.to_dtype(np.full((2, BLOCK, *k.shape[1:]), np.nan), dtype)
    for block in range(len(q) // BLOCK + len(lens) + 1):
        cache.write_block(block, filler)
    tape.program.write_kv(cache, views[1], views[2], ops.OWN_ROWS)
    tape.program.paged_attention(out, views[0], cache, ops.OWN_ROWS, sees="all", **options)
    tape.run(lens)
    result = kit.Guarded((len(q), q.shape[1] * q.shape[2]), dtype)
    tape.program.read(result.array, out)
    return result.check().reshape(q.shape)  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "options"),
    [
        (4, 4, 32, {}),
        (4, 2, 24, {"window": 5}),
        (2, 1, 17, {"softcap": 3.0}),
        (3, 3, 16, {"relative_bias": 32}),
    ],
    ids=str,
)
def test_attention_of_whole_requests(
    kit: Any, tier: str, dtype: str, heads: int, kv_heads: int, head_dim: int, options: dict[str, Any]
) -> None:
    lens = (1, 300, 0, 16, 17, 40)
    q = random(kit, (sum(lens), heads, head_dim), dtype, 0)
    k, v = (random(kit, (sum(lens), kv_heads, head_dim), dtype, seed) for seed in (1, 2))
    given, wanted = {"scale": head_dim**-0.5, **options}, {"scale": head_dim**-0.5, **options}
    table = np.random.default_rng(3).standard_normal((options.get("relative_bias", 0), heads)).astype(np.float32)
    if len(table):
        given["relative_bias"] = t5_bias(table, np.arange(-128, 129), True).T.ravel().tolist()
        del wanted["relative_bias"]
    together = attend(kit, dtype, q, k, v, lens, given)
    starts = np.cumsum([0, *lens])
    for begin, end in zip(starts[:-1], starts[1:], strict=True):
        if begin == end:
            continue
        part = slice(begin, end)
        distance = np.arange(end - begin)[None, :] - np.arange(end - begin)[:, None]
        bias = t5_bias(table, distance, True) if len(table) else None
        expected = oracle(kit, q[part], k[part], v[part], bias=bias, **wanted)
        assert kit.nmse(together[part], expected) < kit.limits[dtype]
        alone = attend(kit, dtype, q[part], k[part], v[part], [end - begin], given)
        assert np.array_equal(alone, together[part])


@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_attention(kit: Any, tier: str, dtype: str) -> None:
    lens, encoder_lens, heads, head_dim = (3, 1, 2), (20, 300, 0), 2, 16
    tables = np.full((3, 20), -1, np.int32)
    tables[0, :2], tables[1, :19] = (5, 2), np.arange(6, 25)
    cache = ops.KVCache(26, BLOCK, heads, head_dim, dtype)
    keys, values = ([random(kit, (n, heads, head_dim), dtype, s) for n in encoder_lens] for s in (0, 1))
    for r in range(2):
        slots = [tables[r, p // BLOCK] * BLOCK + p % BLOCK for p in range(encoder_lens[r])]
        ops.write_kv(cache, keys[r], values[r], np.array(slots, np.int32))
    query = random(kit, (sum(lens), heads, head_dim), dtype, 2)
    tape = kit.Tape(len(query), dtype)
    x, out = tape.load(query), tape.value(heads * head_dim)
    tape.program.paged_attention(out, x, cache, 0, 0.3, sees="encoder")
    tape.run(lens, tables=[tables], encoder_lens=np.array(encoder_lens, np.int32))
    result = kit.Guarded((len(query), heads * head_dim), dtype)
    tape.program.read(result.array, out)
    found = result.check().reshape(query.shape)
    for r, begin in enumerate((0, 3)):
        part = slice(begin, begin + lens[r])
        expected = oracle(kit, query[part], keys[r], values[r], scale=0.3)
        assert kit.nmse(found[part], expected) < kit.limits[dtype]
    assert not kit.to_float64(found[4:]).any()


def test_a_bias_of_past_keys(kit: Any, tier: str) -> None:
    heads, head_dim, n = 2, 16, 290
    q, k, v = (random(kit, (n, heads, head_dim), "float32", seed) for seed in range(3))
    table = np.random.default_rng(3).standard_normal((16, heads)).astype(np.float32)
    cache = ops.KVCache(20, BLOCK, heads, head_dim, "float32")
    blocks = np.arange(19, 0, -1, dtype=np.int32)
    slots = np.array([blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(n)], np.int32)
    tape = kit.Tape(n, "float32")
    views = [tape.load(array) for array in (q, k, v)]
    out = tape.value(heads * head_dim)
    tape.program.write_kv(cache, views[1], views[2], 0)
    bias = t5_bias(table, np.arange(-128, 129), False).T.ravel().tolist()
    tape.program.paged_attention(out, views[0], cache, 0, 0.5, relative_bias=bias)
    tape.run([n], tables=[blocks[None, :]], slots=[slots])
    found = np.empty((n, heads * head_dim), np.float32)
    tape.program.read(found, out)
    distance = np.arange(n)[None, :] - np.arange(n)[:, None]
    biases = np.where((distance > 0)[..., None], -np.inf, t5_bias(table, distance, False))
    expected = oracle(kit, q, k, v, scale=0.5, bias=biases)
    assert kit.nmse(found.reshape(q.shape), expected) < kit.limits["float32"]


@pytest.mark.parametrize("window", [0, 40])
def test_tokens_that_see_ahead(kit: Any, tier: str, window: int) -> None:
    heads, head_dim, n = 2, 16, 290
    q, k, v = (random(kit, (n, heads, head_dim), "float32", seed) for seed in range(3))
    cache = ops.KVCache(20, BLOCK, heads, head_dim, "float32")
    blocks = np.arange(19, 0, -1, dtype=np.int32)
    slots = np.array([blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(n)], np.int32)
    reach = np.random.default_rng(4).integers(0, n + 9, n).astype(np.int32)
    reach[7:270] = 0  # most see nothing ahead
    tape = kit.Tape(n, "float32")
    views = [tape.load(array) for array in (q, k, v)]
    outs = [tape.value(heads * head_dim) for _ in range(2)]
    tape.program.write_kv(cache, views[1], views[2], 0)
    for out, sees in zip(outs, ("ahead", "past"), strict=True):
        tape.program.paged_attention(out, views[0], cache, 0, 0.5, window, sees=sees)
    places = np.arange(n)
    for given in (reach, None):
        tape.run([n], tables=[blocks[None, :]], slots=[slots], reach=given)
        for out, ends in zip(outs, (places if given is None else np.maximum(places, given - 1), places), strict=True):
            has_left = (places[:, None] - places[None, :] >= window) & (window > 0)
            hidden = (places[None, :] > ends[:, None]) | has_left
            found = tape.read(out, n, heads * head_dim).reshape(q.shape)
            biases = np.where(hidden[..., None], -np.inf, np.zeros(heads))
            assert kit.nmse(found, oracle(kit, q, k, v, scale=0.5, bias=biases)) < kit.limits["float32"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_images_take_the_place_of_tokens_or_are_added(kit: Any, dtype: str) -> None:
    x, kept = random(kit, (5, 33), dtype, 0), random(kit, (7, 70), dtype, 1)
    tape = kit.Tape(len(x), dtype)
    view, placed, added = tape.load(x), tape.value(33), tape.value(33)
    tape.program.place_rows(placed, view, kept, 0, False)
    tape.program.place_rows(added, view, kept, 37, True)
    rows = np.array([-1, 6, 0, -1, 6], np.int32)
    tape.run([5], image_rows=rows)
    has_row = (rows >= 0)[:, None]
    assert np.array_equal(tape.read(placed, 5, 33), np.where(has_row, kept[rows, :33], x))
    wide = kit.to_float64(x) + np.where(has_row, kit.to_float64(kept[rows, 37:]), 0.0)
    assert kit.nmse(tape.read(added, 5, 33), wide) < kit.limits[dtype]
    tape.run([5])
    assert np.array_equal(tape.read(added, 5, 33), x)
    with pytest.raises(ValueError, match=r"image_rows\[1\] is 7, not in \[-1, 7\)"):
        tape.run([5], image_rows=np.array([-1, 7, 0, 0, 0], np.int32))
    with pytest.raises(ValueError, match="columns that the rows of images have"):
        tape.program.place_rows(placed, view, kept, 38, False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [1, 33, 576])
def test_means_of_rows(kit: Any, tier: str, dtype: str, cols: int) -> None:
    x = random(kit, (50, cols), dtype, 0)
    ranges = np.array([0, 3, 3, 49, 7], np.int32), np.array([1, 50, 4, 50, 40], np.int32)
    tape = kit.Tape(len(x), dtype)
    view, out = tape.load(x), tape.value(cols, "logits")
    tape.program.mean_rows(out, view)
    tape.run([50], ranges=ranges)
    result = kit.Guarded((5, cols), dtype)
    tape.program.read(result.array, out)
    expected = np.stack([kit.to_float64(x)[a:b].mean(0) for a, b in zip(*ranges, strict=True)])
    assert kit.nmse(result.check(), expected) < kit.limits[dtype]
    with pytest.raises(ValueError, match=r"ends\[0\] is 3, not in \[4, 51\)"):
        tape.run([50], ranges=(np.array([3], np.int32), np.array([3], np.int32)))
    with pytest.raises(ValueError, match="does not say of which"):
        tape.run([50])
